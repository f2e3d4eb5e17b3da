"""The limit on Cog's slots, which leaves its worker threads for health checks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cog_triton.serving.coglet.slot_limit import MAX_SLOTS, limit_slots

TOKIO_BLOCKING_THREADS = 512


@pytest.mark.parametrize(
    ("asked", "taken"), [("501", "500"), ("1536", "500"), ("500", "500"), ("1", "1"), ("x", "x")]
)
def test_no_more_slots_than_the_worker_has_threads_for(
    asked: str, taken: str, caplog: pytest.LogCaptureFixture
) -> None:
    environment = {"COG_MAX_CONCURRENCY": asked}
    limit_slots(environment)
    assert environment == {"COG_MAX_CONCURRENCY": taken}
    assert bool(caplog.text) is (asked != taken)
    if caplog.text:
        assert f"COG_MAX_CONCURRENCY={asked}" in caplog.text
    assert MAX_SLOTS < TOKIO_BLOCKING_THREADS - 2  # a read and a write of the control channel


def test_an_environment_that_asks_for_nothing_stays() -> None:
    environment: dict[str, str] = {}
    limit_slots(environment)
    assert environment == {}


def test_cog_is_started_within_the_limit() -> None:
    code = (
        "import os, runpy; from cog_triton.serving.coglet import http_server;"
        "runpy.run_module = lambda *_, **__: print(os.environ['COG_MAX_CONCURRENCY']);"
        "http_server.main()"
    )
    environment = {"COG_MAX_CONCURRENCY": "1536", "PORT": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == [str(MAX_SLOTS)]
