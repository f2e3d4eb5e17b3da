"""Cog's HTTP server: its environment and directory, and its state as the front sees it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from small_front import behind, on_loop, read_request, until

from cog_triton import errors
from cog_triton.errors import TritonStartFailed
from cog_triton.front import cog_state
from cog_triton.front.cog_state import CogState
from cog_triton.serving.coglet import cog_server

PLAIN = {"TOKIO_WORKER_THREADS": "1", "NO_COLOR": "1", "COG_HOST": "127.0.0.1"}
PLAIN |= {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cog_server, "PLACE", tmp_path / "coglet")
    monkeypatch.setattr(cog_server, "_READY_FILE", tmp_path / "run" / "cog")
    return tmp_path / "coglet"


def make(place: Path, name: str) -> Path:
    directory = place / "predictions" / name
    for part in ("inputs", "outputs"):
        (directory / part).mkdir(parents=True)
    return directory


@pytest.mark.parametrize(
    ("name", "asked", "made"),
    [("COG_MAX_CONCURRENCY", asked, "500") for asked in ("501", "500")]
    + [("COG_MAX_CONCURRENCY", asked, asked) for asked in ("1", "x")]
    + [("TOKIO_WORKER_THREADS", asked, "1") for asked in ("1", "2")],
)
def test_slots_and_threads_are_within_what_cog_can_have(
    name: str, asked: str, made: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = {name: asked, "HOME": "/"}
    assert cog_server.environment(given) == {**given, **PLAIN, name: made}
    assert (f"{name}={asked}: " in caplog.text) is (asked != made)


def test_the_place_is_made_for_one_user_and_left_once_it_is_empty(place: Path) -> None:
    for _ in range(2):
        cog_server.take_place()
        assert place.stat().st_mode & 0o777 == 0o700
    make(place, "one")
    for name in ("", ".", "..", "../other", "/tmp", "one/.."):
        cog_server.remove(name)
    cog_server.leave_place()
    assert (place / "predictions" / "one" / "outputs").is_dir()
    for _ in range(2):
        cog_server.remove("one")
        cog_server.leave_place()
        assert not place.exists()


@pytest.mark.parametrize("part", ["", "predictions"])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("file", "is no directory, so Cog does not start, "),
        ("link", "is no directory, "),
        ("full", "cannot be written, "),
        ("12345", "belongs to the user 12345, "),
        ("65534", "belongs to the user nobody (65534), "),
    ],
)
def test_a_place_that_is_not_ours_is_refused(
    part: str, kind: str, reason: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale, found, moved = make(place, "one"), place / part, place.with_name("moved")
    os.utime(stale, (0, 0))
    if kind == "full":
        monkeypatch.setattr(os, "access", lambda path, _: path != found)
    elif kind.isdecimal():
        if os.geteuid() != 0:
            pytest.skip("only root can be two users")
        os.chown(found, int(kind), -1)
    else:
        found.rename(moved)
        found.symlink_to(moved) if kind == "link" else found.touch()
    with pytest.raises(TritonStartFailed) as caught:
        cog_server.take_place()
    assert caught.value.detail.startswith(f"{found} {reason}")
    assert kind == "file" or stale.is_dir()


def test_a_start_removes_what_a_killed_server_left(place: Path) -> None:
    old, new, spilled = (make(place, name) for name in ("old", "new", "spilled"))
    (spilled / "outputs" / "file").touch()
    for directory in (old, spilled):
        os.utime(directory, (time.time() - 7200,) * 2)
    cog_server.take_place()
    assert not old.exists()
    assert (new / "outputs").is_dir()
    assert (spilled / "outputs" / "file").is_file(), "coglet has yet to read it"


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
        await until(lambda: ("Cog has not answered for 0.05 s", True) in losses)
        assert "has not answered" in str(state.failure)
        monkeypatch.setattr(cog_state, "_TIMEOUT_S", 60)
        cog.answers.set()
        await until(lambda: state.failure is None)
        losses.clear()
        cog.status = "DEFUNCT"
        await until(lambda: losses == [("Cog's worker has died: DEFUNCT", False)])
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
