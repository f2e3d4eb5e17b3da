"""Environment of Cog's server: limits on slots and threads, a readiness file it can write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cog_triton.serving.coglet.server_environment import (
    MAX_SLOTS,
    limit_slots,
    limit_threads,
    require_writable,
)

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


@pytest.mark.parametrize("asked", ["", "1", "2", "x"])
def test_one_thread_looks_for_slots(asked: str, caplog: pytest.LogCaptureFixture) -> None:
    environment = {"TOKIO_WORKER_THREADS": asked} if asked else {}
    limit_threads(environment)
    assert environment == {"TOKIO_WORKER_THREADS": "1"}
    assert (f"TOKIO_WORKER_THREADS={asked}" in caplog.text) is (asked not in ("", "1"))


@pytest.mark.parametrize("place", ["run/cog", "/proc/nothing/cog"])
def test_a_readiness_file_is_given_up_where_it_cannot_be_written(
    place: str, tmp_path: Path
) -> None:
    kubernetes = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    environment = {**kubernetes, "HOME": "/"}
    directory = tmp_path / place
    require_writable(environment, directory)
    assert environment == {**(kubernetes if directory.is_dir() else {}), "HOME": "/"}
    assert directory.is_dir() is directory.is_relative_to(tmp_path)


def test_an_environment_that_asks_for_nothing_stays(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    limit_slots(environment)
    require_writable(environment, tmp_path / "cog")
    assert environment == {}
    assert not (tmp_path / "cog").exists()


def test_cog_is_started_within_the_limit() -> None:
    code = (
        "import os, runpy; from cog_triton.serving.coglet import http_server;"
        "runpy.run_module = lambda *_, **__: print("
        "os.environ['COG_MAX_CONCURRENCY'], os.environ['TOKIO_WORKER_THREADS']);"
        "http_server.main()"
    )
    environment = {"COG_MAX_CONCURRENCY": "1536", "PORT": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == [str(MAX_SLOTS), "1"]
