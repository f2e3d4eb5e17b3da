"""Swapping of models: several backend chains behind one door, of which one has the GPU at a time.

Each model has Cog, Triton and an engine of its own. The engines of all but one rest (parked, see
`cog_triton.keeper`). A request for another model waits until the requests of the one that has the
GPU have ended, and until that has had it for SWAP_RESIDENCE.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from cog_triton import errors
from cog_triton.door.gate import STOPPING
from cog_triton.door.message import Answer, with_samples
from cog_triton.door.upstream import ChainLauncher, PrivatePorts, Upstream, Upstreams, Variant
from cog_triton.door.upstream_connections import read_json
from cog_triton.ipc.connection import Connection
from cog_triton.keeper.keeper_messages import ParkingChanged, ParkLeased, UnparkLeased
from cog_triton.settings import Settings

_LOG = logging.getLogger(__name__)
_KEEPER = "COG_TRITON_ENGINE_KEEPER_NAME"
_GRPC = "TRITON_GRPC_PORT"
_POLL_S = 0.02
_ORDER_S = 300.0
_QUEUE = 64


def first_variant(settings: Settings) -> Variant:
    """What the first chain has that a door without --swap does not give it."""
    return Variant({_KEEPER: _keeper_name()} if settings.cog_triton_swap else {})


def _keeper_name() -> str:
    return f"cog-triton-keeper-{secrets.token_hex(8)}"


@dataclass(eq=False)
class Seat:
    """A model's chain: its upstream, keeper, and models as the OpenAI API lists them."""

    upstream: Upstream
    keeper: str
    models: list[dict[str, Any]] = field(default_factory=list)
    swaps: int = 0
    swap_s: float = 0.0

    @property
    def name(self) -> str:
        """Name of its base model."""
        return str(self.models[0]["id"]) if self.models else self.upstream.name


class Swapping:
    """Turns of the models behind one door; `upstreams.serving` is the one that has the GPU."""

    def __init__(self, settings: Settings, upstreams: Upstreams, launcher: ChainLauncher) -> None:
        self._settings = settings
        self._upstreams = upstreams
        self._launcher = launcher
        chain = upstreams.serving.chain
        assert chain is not None
        self._first = self._resident = Seat(upstreams.serving, chain.environment[_KEEPER])
        self._seats = [self._first]
        self._waiting: deque[tuple[Seat, asyncio.Future[None]]] = deque()
        self._asked = asyncio.Event()
        self._draining = True
        self._until = 0.0
        self._refusing = False
        self._task: asyncio.Task[None] | None = None
        self._ports: list[PrivatePorts] = []
        self._most = _QUEUE if settings.max_queue is None else settings.max_queue
        self.ready = False
        """Whether all models have been loaded."""

    def start(self) -> None:
        """Load all models, one after the other, then give turns."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Give no more turns."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for ports in self._ports:
            ports.close()

    def refuse(self) -> None:
        """End those that wait, with E2105, and have nobody wait any more: the door drains."""
        self._refusing = True
        for _, turn in self._waiting:
            if not turn.done():
                turn.set_exception(errors.TritonUnavailable(STOPPING))

    @property
    def models(self) -> list[dict[str, Any]]:
        """All models, as the OpenAI API lists them."""
        return [model for seat in self._seats for model in seat.models]

    @property
    def first_names(self) -> list[str]:
        """Names of the first model, which predictions go to, and of its adapters."""
        return [str(each["id"]) for each in self._first.models] or [self._first.name]

    async def turn_of(self, model: str | None) -> Upstream:
        """Wait for a model's turn; the first model's for None. See `Route.upstream_of`."""
        seat = self._seat(model)
        while seat is not self._resident or self._draining:
            if self._refusing:
                raise errors.TritonUnavailable(STOPPING)
            if seat.upstream.exit_code() is not None:
                raise errors.TritonUnavailable(f"the server of model {seat.name!r} has ended")
            if len(self._waiting) >= self._most:
                raise errors.Overloaded(
                    f"{len(self._waiting)} requests wait for a model to be swapped in (MAX_QUEUE)"
                )
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((seat, turn))
            self._asked.set()
            try:
                await turn
            finally:
                with suppress(ValueError):
                    self._waiting.remove((seat, turn))
        return seat.upstream

    def with_metrics(self, status: int, body: bytes) -> Answer | None:
        """Metrics of the model that has the GPU, and those of swaps."""
        if status != 200:
            return None
        lines = []
        for name, kind, value in (
            ("cog_triton_swaps_total", "counter", lambda seat: seat.swaps),
            ("cog_triton_swap_seconds_total", "counter", lambda seat: round(seat.swap_s, 6)),
            ("cog_triton_model_resident", "gauge", lambda seat: int(seat is self._resident)),
        ):
            lines.append(f"# TYPE {name} {kind}")
            lines += [f"{name}{{model={json.dumps(s.name)}}} {value(s)}" for s in self._seats]
        return with_samples(body, lines)

    def _seat(self, model: str | None) -> Seat:
        if model is None:
            return self._first
        for seat in self._seats:
            if any(listed["id"] == model for listed in seat.models):
                return seat
        names = [str(listed["id"]) for listed in self.models]
        raise errors.NotFound(
            f"model={model[:80]!r}: not served here; the models are"
            f" {', '.join(map(repr, names))}{errors.nearest(model[:200], names)}"
        )

    async def _run(self) -> None:
        try:
            await self._load_all()
        except (errors.CogTritonError, OSError) as error:
            _LOG.error("%s", error)
            assert self._first.upstream.chain is not None
            await asyncio.to_thread(self._first.upstream.chain.reaper.kill)
            return
        self.ready = True
        while True:
            self._draining = False
            self._hand_out()
            while (seat := self._next()) is None:
                self._asked.clear()
                await self._asked.wait()
            await asyncio.sleep(max(0.0, self._until - time.monotonic()))
            if (seat := self._next()) is not None:  # all who asked may have left
                await self._swap(seat)

    def _next(self) -> Seat | None:
        """The model that somebody has waited for longest, other than the one that has the GPU."""
        return next((seat for seat, _ in self._waiting if seat is not self._resident), None)

    def _hand_out(self) -> None:
        """Let those go on whose turn it is."""
        for seat, turn in self._waiting:
            if seat is self._resident and not turn.done():
                turn.set_result(None)

    async def _swap(self, seat: Seat) -> None:
        """Give the GPU to `seat`; where that fails, who waits for it gets the error."""
        self._draining = True  # of the model that has it, newcomers wait, too
        began, old = time.monotonic(), self._resident
        await self._drain(old.upstream)
        drained = time.monotonic()
        try:
            await self._order(old, ParkLeased())
            await self._order(seat, UnparkLeased())
        except errors.CogTritonError as error:
            _LOG.error("model %s cannot be swapped for %s: %s", old.name, seat.name, error)
            with suppress(errors.CogTritonError):
                await self._order(old, UnparkLeased())
            for waits, turn in self._waiting:
                if waits is seat and not turn.done():
                    turn.set_exception(error)
            return
        finally:
            self._until = time.monotonic() + self._settings.swap_residence
        self._resident, self._upstreams.serving = seat, seat.upstream
        took = time.monotonic() - drained
        seat.swaps, seat.swap_s = seat.swaps + 1, seat.swap_s + took
        waited = drained - began
        _LOG.info(
            "model %s has the GPU: drained in %.2f s, swapped in %.2f s", seat.name, waited, took
        )

    async def _drain(self, upstream: Upstream) -> None:
        """Wait until an upstream has no requests; those that take too long end with E2105."""
        deadline = time.monotonic() + self._settings.swap_drain
        while upstream.connections.in_flight:
            if time.monotonic() > deadline:
                upstream.connections.break_off()
            await asyncio.sleep(_POLL_S)

    async def _load_all(self) -> None:
        """Load the models in turn; the first one has the GPU in the end."""
        await self._until_ready(self._first)
        last = self._first
        for environment in json.loads(self._settings.cog_triton_swap or "[]"):
            await self._order(last, ParkLeased())
            last = await self._loaded(environment)
        names = [model["id"] for model in self.models]
        if twice := {name for name in names if names.count(name) > 1}:
            raise errors.InvalidArgument(f"--swap: several models are called {min(twice)!r}")
        if last is not self._first:
            await self._order(last, ParkLeased())
            await self._order(self._first, UnparkLeased())

    async def _loaded(self, environment: Mapping[str, str]) -> Seat:
        keeper = _keeper_name()
        self._ports.append(grpc := PrivatePorts([_GRPC]))  # the public one is the first model's
        own = {_KEEPER: keeper, _GRPC: str(grpc.numbers[_GRPC])}
        upstream = self._launcher.start(Variant({**environment, **own}))
        self._upstreams.add(upstream)
        upstream.follow()
        seat = Seat(upstream, keeper)
        await self._until_ready(seat)
        self._seats.append(seat)
        return seat

    async def _until_ready(self, seat: Seat) -> None:
        upstream = seat.upstream
        await upstream.until_ready()
        try:
            listed = await read_json(upstream.ports["OPENAI_PORT"], b"/v1/models")
            seat.models = list(listed["data"])
        except (OSError, ValueError, LookupError) as error:
            raise errors.TritonStartFailed(f"{upstream.name} lists no models: {error}") from error

    async def _order(self, seat: Seat, order: ParkLeased | UnparkLeased) -> None:
        """Have a keeper park its engine, or take it back; raises E2110 or E2105."""
        error = await asyncio.to_thread(_answer, seat.keeper, order)
        if error is not None:
            raise error


def _answer(keeper: str, order: ParkLeased | UnparkLeased) -> errors.CogTritonError | None:
    try:
        with Connection.to(keeper) as connection:
            connection.send(order)
            answer = connection.receive(_ORDER_S)
    except TimeoutError:
        return errors.TritonUnavailable("the engine keeper does not answer")
    except (OSError, EOFError) as error:
        return errors.TritonUnavailable(
            f"the engine has no keeper that answers, as TensorRT-LLM's has none: {error}"
        )
    assert isinstance(answer, ParkingChanged)
    return answer.error
