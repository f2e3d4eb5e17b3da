"""Mock engine: its thread emits every token of every stream, and can be stopped at any time."""

from __future__ import annotations

import itertools
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mock_requests import MODEL, expected_tokens, request

from cog_triton.engines.base import EngineStats
from cog_triton.engines.mock import mock_directory
from cog_triton.engines.mock.engine import MockEngine
from cog_triton.engines.mock.mock_options import MockOptions
from cog_triton.engines.request import TokenEvent
from cog_triton.errors import InvalidArgument, TritonUnknownError

PATIENCE_S = 10
FOREVER = 9000
HANDLES = itertools.count(1)


@contextmanager
def running(**options: Any) -> Iterator[MockEngine]:
    engine = MockEngine(MODEL, MockOptions(**options))
    try:
        yield engine
    finally:
        closer = threading.Thread(target=engine.close, daemon=True)
        closer.start()
        closer.join(PATIENCE_S)
        assert not closer.is_alive(), "close() hangs"


class Asked:
    """One request, and the events that it brings."""

    def __init__(self, engine: MockEngine, **values: Any) -> None:
        self.handle = next(HANDLES)
        self._events: queue.Queue[TokenEvent] = queue.Queue()
        engine.submit(self.handle, request(**values), self._events.put)

    def next(self) -> TokenEvent:
        return self._events.get(timeout=PATIENCE_S)

    def until_end(self) -> tuple[list[int], TokenEvent]:
        event = self.next()
        ids = event.token_ids
        while event.finish is None and event.error is None:
            event = self.next()
            ids += event.token_ids
        return ids, event

    @property
    def is_silent(self) -> bool:
        return self._events.empty()


@pytest.mark.parametrize("tps", [0, 2000])
def test_concurrent_streams_all_send_their_whole_output(tps: float) -> None:
    with running(tps=tps) as engine:
        asked = [Asked(engine, max_tokens=100 + number) for number in range(32)]
        for number, each in enumerate(asked):
            ids, last = each.until_end()
            assert ids == expected_tokens(100 + number)
            assert last.finish == "length"
        assert engine.stats() == EngineStats(0, 0, 256)


def test_waits_of_microseconds_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """SimpleQueue's do not where threads contend: one in a thousand streams never began."""
    pause = MockEngine._wait_s
    monkeypatch.setattr(
        MockEngine, "_wait_s", lambda engine: None if pause(engine) is None else 1e-6
    )
    interval = sys.getswitchinterval()
    with running(tps=1000) as engine:
        asked = Asked(engine, max_tokens=1000)

        def disturb() -> None:
            for _ in range(20_000):
                engine.cancel(0)

        sys.setswitchinterval(1e-6)
        try:
            threads = [threading.Thread(target=disturb) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        assert asked.until_end()[0] == expected_tokens(1000)


def test_at_unlimited_rate_every_token_is_one_response() -> None:
    with running(tps=0) as engine:
        asked = Asked(engine, max_tokens=500)
        assert all(len(asked.next().token_ids) == 1 for _ in range(500))


def test_cancel_ends_only_its_own_stream() -> None:
    with running(tps=0, max_batch_size=1) as engine:
        running_one, waiting = Asked(engine, max_tokens=FOREVER), Asked(engine, max_tokens=2)
        running_one.next()
        assert engine.stats() == EngineStats(2, 1, 1)
        engine.cancel(running_one.handle)
        ids, last = running_one.until_end()
        assert last.finish == "cancelled"
        assert len(ids) < FOREVER
        assert waiting.until_end()[0] == expected_tokens(2)
        engine.cancel(running_one.handle)
        engine.cancel(10**9)
        assert Asked(engine, max_tokens=1).until_end()[0] == expected_tokens(1)


def test_cancel_during_prefill_ends_the_stream() -> None:
    with running(prefill_ms=60_000) as engine:
        asked = Asked(engine)
        engine.cancel(asked.handle)
        assert asked.until_end() == ([], TokenEvent([], [], "cancelled"))
        assert engine.stats().active == 0


def test_close_does_not_wait_for_long_streams() -> None:
    with running(tps=0) as engine:
        Asked(engine, max_tokens=FOREVER).next()


def test_a_refused_request_gets_its_error_and_others_continue() -> None:
    with running(tps=0) as engine:
        other = Asked(engine, max_tokens=2000)
        _, last = Asked(engine, prompt=0).until_end()
        assert isinstance(last.error, InvalidArgument)
        _, last = Asked(engine, inject="error", inject_after=0).until_end()
        assert isinstance(last.error, TritonUnknownError)
        assert other.until_end()[0] == expected_tokens(2000)


def test_a_hanging_engine_sends_nothing_and_can_be_closed() -> None:
    with running(tps=0) as engine:
        other = Asked(engine, max_tokens=FOREVER, tps=1.0)
        hanging = Asked(engine, max_tokens=5, inject="hang", inject_after=2)
        assert [hanging.next().token_ids, hanging.next().token_ids] == [
            expected_tokens(1),
            expected_tokens(2)[1:],
        ]
        later = Asked(engine, max_tokens=1)
        engine.cancel(other.handle)
        with pytest.raises(queue.Empty):
            later._events.get(timeout=0.2)
        assert other.is_silent
        assert hanging.is_silent


SCRIPT = """
import sys, threading
from cog_triton.engines.mock.engine import MockEngine
from mock_requests import request

engine = MockEngine.from_parameters({"engine_dir": sys.argv[1], "tps": "0"})
engine.submit(1, request(9, **eval(sys.argv[2])), eval(sys.argv[3]))
threading.Event().wait(10)
"""


def process(engine_dir: Path, values: str, emit: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(engine_dir), values, emit],
        cwd=Path(__file__).parent,
        capture_output=True,
        timeout=60,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def test_an_injected_crash_kills_the_process(tmp_path: Path) -> None:
    values = "{'inject': 'crash', 'inject_after': 3}"
    code, output = process(
        mock_directory.make_engine(tmp_path),
        values,
        "lambda event: print(*event.token_ids, flush=True)",
    )
    assert code == -9
    assert len(output.split()) == 3


def test_an_exception_in_the_thread_ends_the_process(tmp_path: Path) -> None:
    code, output = process(mock_directory.make_engine(tmp_path), "{}", "lambda event: 1 / 0")
    assert code == 1
    assert "ZeroDivisionError" in output
