"""Swapping of models behind the door: whose turn it is, and what becomes of those that wait."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from small_door import answering, opened, run, served

from cog_triton import errors
from cog_triton.door.access import Access
from cog_triton.door.gate import OpenAIGate, model_of
from cog_triton.door.large_bodies import LargeBodies
from cog_triton.door.request_parser import Limits
from cog_triton.door.swapping import Swapping
from cog_triton.door.upstream import (
    Chain,
    ChainLauncher,
    PrivatePorts,
    Route,
    Upstream,
    Upstreams,
    Variant,
)
from cog_triton.ipc import streams
from cog_triton.keeper.keeper_messages import ParkingChanged
from cog_triton.settings import load_settings
from cog_triton.system.reaper import Reaped

KEEPER = "COG_TRITON_ENGINE_KEEPER_NAME"


class Living:
    """A chain's reaper, which runs."""

    def poll(self) -> int | None:
        return None

    def kill(self) -> None:
        pass


class Stream:
    """A response that is being passed on."""

    def __init__(self) -> None:
        self.broken = asyncio.Event()

    def break_off(self) -> None:
        self.broken.set()


class Models:
    """Two models, `a` and `b`, whose keepers note what they are told."""

    def __init__(self) -> None:
        self.orders: list[str] = []
        self.errors: dict[str, errors.CogTritonError] = {}
        self.swapping: Swapping = cast(Swapping, None)
        self.upstreams: Upstreams = cast(Upstreams, None)

    @asynccontextmanager
    async def keeper(self, model: str, name: str) -> AsyncIterator[None]:
        async def obey(stream: streams.Stream) -> None:
            order = type(await stream.receive()).__name__
            self.orders.append(f"{model} {order}")
            error = self.errors.get(self.orders[-1])
            stream.send(ParkingChanged(error))

        server = streams.Server(name, obey)
        try:
            yield
        finally:
            server.close()
            await server.stop()

    def upstream(self, model: str, port: int, environment: dict[str, str]) -> Upstream:
        chain = Chain(cast(Reaped, Living()), PrivatePorts([]), None, environment, Variant())
        return Upstream(model, {"OPENAI_PORT": port}, chain)

    def is_ready(self, upstream: Upstream) -> None:
        upstream.state.listens = True
        upstream.state._take({"status": "READY"})

    async def until(self, holds: Callable[[], Any]) -> None:
        while not holds():
            await asyncio.sleep(0.01)


def listing(model: str) -> bytes:
    described = {"id": model, "object": "model", "created": 0, "max_model_len": 8}
    body = json.dumps({"object": "list", "data": [described]}).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


Scenario = Callable[[Models], Awaitable[None]]


def with_models(**settings: Any) -> Callable[[Scenario], Callable[[], None]]:
    """A test of a scenario that begins once both models are loaded, and `a` has the GPU."""

    async def main(scenario: Scenario) -> None:
        models = Models()
        names: dict[str, str] = {}
        values = {"swap_residence": 0.0, **settings}
        read = load_settings(cog_triton_swap='[{"COG_WEIGHTS": "b"}]', **values)
        async with served(answering(listing("a"))) as a, served(answering(listing("b"))) as b:
            names["a"] = f"cog-triton-test-{secrets.token_hex(8)}"
            first = models.upstream("a", a.gate.port, {KEEPER: names["a"]})
            models.is_ready(first)
            loaded = asyncio.Event()

            async def keep(upstream: Upstream, name: str) -> None:
                async with models.keeper("b", name):
                    models.is_ready(upstream)
                    await loaded.wait()

            keepers = []

            class Launcher:
                def start(self, variant: Variant) -> Upstream:
                    assert variant.environment["COG_WEIGHTS"] == "b"
                    assert variant.environment["TRITON_GRPC_PORT"].isdecimal()
                    made = models.upstream("b", b.gate.port, dict(variant.environment))
                    keeping = keep(made, variant.environment[KEEPER])
                    keepers.append(asyncio.ensure_future(keeping))
                    return made

            async with models.keeper("a", names["a"]):
                models.upstreams = Upstreams(first)
                launcher = cast(ChainLauncher, Launcher())
                models.swapping = Swapping(read, models.upstreams, launcher)
                models.upstreams.swapping = models.swapping
                models.swapping.start()
                await models.until(lambda: models.swapping.ready)
                assert models.orders == ["a ParkLeased", "b ParkLeased", "a UnparkLeased"]
                models.orders.clear()
                try:
                    await scenario(models)
                finally:
                    await models.swapping.close()
                    loaded.set()
                    await asyncio.gather(*keepers)

    return lambda scenario: lambda: run(main(scenario))


async def turn(models: Models, model: str | None) -> str:
    return (await models.swapping.turn_of(model)).name


@with_models()
async def test_a_request_for_another_model_swaps_it_in(models: Models) -> None:
    assert await turn(models, "a") == await turn(models, None) == "a"
    assert models.orders == []
    assert await turn(models, "b") == "b"
    assert models.orders == ["a ParkLeased", "b UnparkLeased"]
    assert await turn(models, None) == "a"  # such as /predictions
    answer = models.swapping.with_metrics(200, b"# EOF\n")
    assert answer is not None
    assert b'cog_triton_swaps_total{model="b"} 1' in answer.body
    assert b'cog_triton_model_resident{model="a"} 1' in answer.body


@with_models()
async def test_a_swap_waits_for_requests_and_newcomers_wait_for_it(models: Models) -> None:
    connections = models.upstreams.serving.connections
    with connections.request(Stream()):
        b = asyncio.ensure_future(turn(models, "b"))
        await models.until(lambda: models.swapping._draining)
        a = asyncio.ensure_future(turn(models, "a"))  # would starve b if it went on
        await asyncio.sleep(0.1)
        assert not models.orders
        assert not a.done()
        assert not b.done()
    assert await b == "b"
    assert await a == "a"


@with_models(swap_residence=600.0)
async def test_a_model_has_the_gpu_for_its_residence(models: Models) -> None:
    assert await turn(models, "b") == "b"
    a = asyncio.ensure_future(turn(models, "a"))
    await asyncio.sleep(0.1)
    assert await turn(models, "b") == "b"
    assert not a.done()
    a.cancel()


@with_models(swap_residence=0.3)
async def test_a_model_leaves_the_gpu_after_its_residence(models: Models) -> None:
    assert await turn(models, "b") == "b"
    until = models.swapping._until
    assert await turn(models, "a") == "a"
    assert time.monotonic() >= until


@with_models(swap_drain=0.1)
async def test_requests_that_do_not_end_are_broken_off(models: Models) -> None:
    stream = Stream()

    async def streams() -> None:
        with models.upstreams.serving.connections.request(stream):
            await stream.broken.wait()

    streaming = asyncio.ensure_future(streams())
    await asyncio.sleep(0)
    assert await turn(models, "b") == "b"
    await streaming


@with_models(max_queue=2)
async def test_the_queue_is_bounded_and_left_by_clients_that_go(models: Models) -> None:
    with models.upstreams.serving.connections.request(Stream()):
        waiting = [asyncio.ensure_future(turn(models, "b")) for _ in range(2)]
        await models.until(lambda: len(models.swapping._waiting) == 2)
        with pytest.raises(errors.Overloaded, match="2 requests wait"):
            await turn(models, "b")
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert not models.swapping._waiting
    assert await turn(models, "a") == "a"


@with_models()
async def test_an_engine_that_cannot_be_parked_serves_on(models: Models) -> None:
    models.errors["a ParkLeased"] = errors.EngineNotParked("it needs 20 GB")
    with pytest.raises(errors.EngineNotParked, match="20 GB"):
        await turn(models, "b")
    assert await turn(models, "a") == "a"
    models.errors.clear()
    assert await turn(models, "b") == "b"


@with_models()
async def test_an_engine_that_does_not_come_back_leaves_the_other(models: Models) -> None:
    models.errors["b UnparkLeased"] = errors.TritonUnavailable("gone")
    with pytest.raises(errors.TritonUnavailable, match="gone"):
        await turn(models, "b")
    assert models.orders == ["a ParkLeased", "b UnparkLeased", "a UnparkLeased"]
    assert await turn(models, "a") == "a"


@with_models()
async def test_those_that_wait_are_told_of_a_drain(models: Models) -> None:
    with models.upstreams.serving.connections.request(Stream()):
        waits = asyncio.ensure_future(turn(models, "b"))
        await models.until(lambda: models.swapping._waiting)
        models.swapping.refuse()
        for one in (waits, asyncio.ensure_future(turn(models, "b"))):
            with pytest.raises(errors.TritonUnavailable, match="stopping"):
                await one


@with_models()
async def test_the_openai_api_lists_all_models_and_chooses_by_name(models: Models) -> None:
    route = Route(models.upstreams, "OPENAI_PORT")
    gate = OpenAIGate(route, Access(None, True), Limits(), LargeBodies(), metrics_public=True)
    async with opened(gate) as door:
        listed = await door.ask(request("GET", "/v1/models"))
        assert [one["id"] for one in body(listed)["data"]] == ["a", "b"]
        assert body(await door.ask(request("GET", "/v1/models/b")))["id"] == "b"
        version = b"anthropic-version: 1\r\nconnection"
        for path, first in (("", "first_id"), ("/a", "display_name")):
            asked = request("GET", f"/v1/models{path}").replace(b"connection", version)
            assert body(await door.ask(asked))[first] == "a"
        asked = await door.ask(request("POST", "/v1/completions", {"model": "b"}))
        assert body(asked)["data"][0]["id"] == "b"
        refused = await door.ask(request("POST", "/v1/completions", {"model": "bb"}))
        assert refused.startswith(b"HTTP/1.1 404")
        assert "the models are 'a', 'b'; did you mean 'b'?" in refused.decode()


def request(method: str, path: str, values: dict[str, str] | None = None) -> bytes:
    sent = json.dumps(values).encode() if values else b""
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head.encode() + b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(sent), sent)


def body(answer: bytes) -> Any:
    return json.loads(answer.partition(b"\r\n\r\n")[2])


@pytest.mark.parametrize("sent", [b"", b"{", b"[]", b'{"model": 3}', b'{"prompt": "x"}'])
def test_a_request_that_names_no_model_is_for_the_first(sent: bytes) -> None:
    assert model_of(sent) is None
