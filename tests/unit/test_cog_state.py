"""State of Cog behind the front: no prediction is refused for what Cog said before it came."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from small_front import behind, on_loop, read_request, until

from cog_triton import errors
from cog_triton.front import cog_state
from cog_triton.front.cog_state import CogState


class Cog:
    """Answers health checks with `status` as it was when they came, once `answers`."""

    def __init__(self, status: str) -> None:
        self.status = status
        self.reads = 0
        self.schema: dict[str, Any] = {}
        self.prediction: bytes = b""
        self.predictions: list[bytes] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reads += 1
        body = json.dumps({"status": self.status, **self.schema}).encode()
        with suppress(asyncio.IncompleteReadError):
            request = await read_request(reader)
            await self.answers.wait()
            if request.startswith(b"PUT"):
                self.predictions.append(request)
                writer.write(self.prediction)
            else:
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + body)
        writer.close()


@asynccontextmanager
async def cog_with(status: str, check_id: str | None = None) -> AsyncIterator[tuple[Cog, CogState]]:
    """A Cog that says `status`, and its state."""
    cog = Cog(status)
    async with behind(cog.handle) as port:
        yield cog, CogState(port, check_id)


@pytest.mark.parametrize("status", ["STARTING", "DEFUNCT"])
@on_loop
async def test_a_client_that_was_told_ready_is_served(status: str) -> None:
    async with cog_with(status) as (cog, state):
        with pytest.raises(errors.TritonUnavailable):
            await state.require_serving()
        cog.status = "READY"
        await state.require_serving()
        await state.require_serving()
        assert cog.reads == 2


@on_loop
async def test_a_cog_that_does_not_answer_holds_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cog_state, "_FRESH_TIMEOUT_S", 0.05)

    async with cog_with("STARTING") as (cog, state):
        cog.answers.clear()
        with pytest.raises(errors.TritonUnavailable, match="starting"):
            await state.require_serving()
        cog.answers.set()


@on_loop
async def test_a_cog_that_stops_answering_or_loses_its_worker_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cog_state, "_TIMEOUT_S", 0.05)
    monkeypatch.setattr(cog_state, "_LOST_S", 0.2)
    losses: list[tuple[str, bool]] = []

    async with cog_with("READY") as (cog, state):
        state.on_loss = lambda reason, late: losses.append((reason, late))
        watching = asyncio.ensure_future(state.watch())
        await state.started
        assert state.failure is None
        cog.answers.clear()
        await until(lambda: losses == [("Cog has not answered for 0.05 s", True)])
        assert "has not answered" in str(state.failure)
        cog.answers.set()
        await until(lambda: state.failure is None)
        cog.status = "DEFUNCT"
        await until(lambda: state.failure is not None)
        assert losses[1:] == []
        await until(lambda: losses[1:] == [("Cog's worker has died: DEFUNCT", False)])
        watching.cancel()


@on_loop
async def test_a_set_up_that_fails_ends_the_start() -> None:
    async with cog_with("SETUP_FAILED") as (_, state):
        watching = asyncio.ensure_future(state.watch())
        with pytest.raises(errors.TritonUnavailable, match="set-up failed"):
            await state.started
        watching.cancel()


def answer(code: int = 200, **values: str) -> bytes:
    return b"HTTP/1.1 %d X\r\n\r\n" % code + json.dumps(values).encode()


SUCCEEDED = answer(status="succeeded")
READY = b'{"status":"READY","setup":{"logs":"all is well"}}'


def revised(state: CogState) -> dict[str, Any]:
    """What /health-check says while Cog says READY."""
    found = state.revise_health(200, READY)
    return dict(json.loads(READY if found is None else found.body))


@on_loop
async def test_ready_is_said_once_a_prediction_has_passed() -> None:
    async with cog_with("READY", "drain-1") as (cog, state):
        cog.prediction = answer(503, error="E2105 TritonUnavailable: restarting")
        assert revised(state)["status"] == "STARTING"
        assert state.revise_health(200, b'{"status":"STARTING"}') is None
        named = b'{"user_healthcheck_error":"%bE2105 TritonUnavailable: it has gone"}'
        worded = state.revise_health(200, named % b"Healthcheck failed: TritonUnavailable: ")
        assert worded is not None
        assert worded.body == named % b""
        watching = asyncio.ensure_future(state.watch())
        await until(lambda: len(cog.predictions) > 1)
        with pytest.raises(errors.TritonUnavailable, match="starting"):
            state.require_checked()
        with pytest.raises(errors.TritonUnavailable, match="starting"):
            await state.require_serving()
        assert revised(state)["status"] == "STARTING"
        cog.prediction = SUCCEEDED
        await until(lambda: state.failure is None)
        state.require_checked()
        await state.require_serving()
        assert revised(state)["status"] == "READY"
        sent = len(cog.predictions)
        await until(lambda: state.health["status"] == "READY")
        assert len(cog.predictions) == sent
        assert cog.predictions[0].startswith(b"PUT /predictions/drain-1 HTTP/1.1\r\n")
        assert len({request.split()[1] for request in cog.predictions}) == sent
        watching.cancel()


@pytest.mark.parametrize(
    ("prediction", "reason"),
    [
        (answer(status="failed", error="Permission denied (os error 13)"), "Permission denied"),
        (answer(500, error="no"), "HTTP status 500"),
        (answer(error="E2100 TritonUnknownError: odd"), "E2100"),
    ],
)
@on_loop
async def test_a_first_prediction_that_fails_is_a_failed_start(
    prediction: bytes, reason: str
) -> None:
    async with cog_with("READY", "drain-1") as (cog, state):
        cog.prediction = prediction
        watching = asyncio.ensure_future(state.watch())
        await until(lambda: state.health.get("status") == "SETUP_FAILED")
        for required in (state.require_serving(), asyncio.to_thread(state.require_checked)):
            with pytest.raises(errors.TritonStartFailed, match=reason):
                await required
        health = revised(state)
        assert health["status"] == "SETUP_FAILED"
        assert isinstance(errors.from_text(health["setup"]["logs"]), errors.TritonStartFailed)
        assert state.failure is not None
        assert len(cog.predictions) == 1
        watching.cancel()


@pytest.mark.parametrize(
    ("prediction", "reason"),
    [(answer(202), "HTTP status 202"), (answer(error="E2101 TritonTimeout: late"), "E2101")],
)
@pytest.mark.parametrize("late", [1, 4])
@on_loop
async def test_a_first_prediction_that_is_late_is_tried_anew(
    prediction: bytes, reason: str, late: int
) -> None:
    async with cog_with("READY", "drain-1") as (cog, state):
        cog.prediction = prediction
        for _ in range(late - 1):
            await state._check("drain-1")
            assert revised(state)["status"] == "STARTING"
        if late < 4:
            cog.prediction = SUCCEEDED
        await state._check("drain-1")
        health = revised(state)
        assert health["status"] == ("READY" if late < 4 else "SETUP_FAILED")
        assert late < 4 or reason in health["setup"]["logs"]
        names = [f"/predictions/drain-1{end}" for end in ("", ".1", ".2", ".3")]
        assert [request.split()[1].decode() for request in cog.predictions] == names[:late]
