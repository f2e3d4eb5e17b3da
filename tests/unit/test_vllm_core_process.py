"""EngineCore's process, which is there before vLLM is imported, and ends with what is above it."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_server import wait_until
from vllm_engines import double_environment
from vllm_hosts import ABC, ask, over_double, token_ids, tokens

from cog_triton.engines.vllm import core_process
from cog_triton.engines.vllm.core_process import CoreProcess

PROGRAM = "cog_triton.engines.vllm.core_process"


@pytest.fixture
def core() -> Iterator[CoreProcess]:
    made = CoreProcess(["LlamaForCausalLM"], ranks=1)
    yield made
    made._end()


def started(core: CoreProcess, target: Callable[..., Any], *args: Any) -> Any:
    process = core_process._Offering(core).Process(target=target, args=args, name="EngineCore")
    process.start()
    return process


def is_core(pid: int) -> bool:
    return PROGRAM in Path(f"/proc/{pid}/cmdline").read_text()


@pytest.mark.parametrize("victim", ["host", "core"])
def test_enginecore_is_the_process_that_was_begun_first_and_ends_with_its_host(
    victim: str, tmp_path: Path
) -> None:
    with over_double(tmp_path) as host:
        (told,) = host.calls("engine_core")
        core = told["pid"]
        assert is_core(core)
        environment = told["environment"]
        assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
        assert environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0", "which the host has set since"
        assert token_ids(ask(host.engine, tokens(ABC, 2))) == [97, 98]
        os.kill(core if victim == "core" else host.pid, signal.SIGKILL)
        assert host.engine._process.wait(60) != 0
        wait_until(lambda: not Path(f"/proc/{core}").exists())


def test_a_users_own_way_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    with over_double(tmp_path) as host:
        (told,) = host.calls("engine_core")
        below = Path(f"/proc/{host.pid}/task/{host.pid}/children").read_text().split()
        assert not any(map(is_core, {told["pid"], *map(int, below)})), "and none is left"


def test_it_starts_as_ever_where_its_process_has_died(
    core: CoreProcess, caplog: pytest.LogCaptureFixture
) -> None:
    os.kill(core.pid, signal.SIGKILL)
    os.waitid(os.P_PID, core.pid, os.WEXITED | os.WNOWAIT)
    process = started(core, os._exit, 7)
    process.join(60)
    assert process.exitcode == 7
    assert process.pid != core.pid
    assert "has died" in caplog.text


def test_a_vllm_that_starts_it_in_another_way_is_told_of(
    core: CoreProcess,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    vllm_environment: None,
) -> None:
    monkeypatch.syspath_prepend(double_environment()["PYTHONPATH"].split(os.pathsep)[0])
    from vllm.v1.engine import utils  # type: ignore[import-not-found, unused-ignore]

    assert core_process._seam() is utils
    monkeypatch.setattr(utils, "get_mp_context", theirs := lambda method: method)
    with caplog.at_level(logging.WARNING), core.offered():
        assert utils.get_mp_context is theirs
    assert "get_mp_context takes ['method']" in caplog.text
    assert not Path(f"/proc/{core.pid}").exists()
