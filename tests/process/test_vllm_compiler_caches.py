"""Where the compilers of a vLLM engine write."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import double_environment
from vllm_hosts import running

from cog_triton.engines.vllm import compiler_caches
from cog_triton.engines.vllm.compiler_caches import DIRECTORY, MOST_BYTES
from cog_triton.errors import EngineIncompatible


def begun(base: Path, most: int = 10**9, **arguments: Any) -> Path:
    """The directory of an engine that a process has started with, and has ended."""
    program = (
        "import json, os, sys\n"
        "from cog_triton.engines.vllm import compiler_caches as caches\n"
        "caches.begin(json.loads(sys.argv[1]), json.loads(sys.argv[2]), '0.33.0')\n"
        "print(os.path.dirname(os.environ['VLLM_CACHE_ROOT']))"
    )
    options = {DIRECTORY: str(base), MOST_BYTES: str(most)}
    command = [sys.executable, "-c", program, json.dumps(options), json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def test_an_engine_finds_its_directory_again_and_shares_it_with_no_other(tmp_path: Path) -> None:
    base = tmp_path / "caches"
    first = begun(base, model="/m", gpu_memory_utilization=0.9)
    assert begun(base, model="/m", gpu_memory_utilization=0.9, hf_token="x") == first
    assert begun(base, model="/m", gpu_memory_utilization=0.5) != first
    assert begun(base, model="/other", gpu_memory_utilization=0.9) != first
    assert {path.stat().st_mode & 0o777 for path in (base, first)} == {0o700}


def test_what_the_environment_has_vllm_do_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def key() -> str:
        return compiler_caches._key({"model": "/m"}, "0.33.0", os.environ)

    before = key()
    for name, value in compiler_caches.variables(Path("/elsewhere")).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.1")
    assert key() == before
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert key() != before


def test_a_start_evicts_what_was_unused_for_longest_until_the_rest_fits(tmp_path: Path) -> None:
    base = tmp_path / "caches"
    roots = [begun(base, model=f"/{number}") for number in range(3)]
    for age, root in enumerate(roots):
        (root / "kernel").write_bytes(bytes(1000))
        os.utime(root, (age, age))
    held = os.open(roots[0] / "in-use.lock", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_SH)  # as a server does that runs
    last = begun(base, 2000, model="/3")
    os.close(held)
    assert sorted(base.iterdir()) == sorted([roots[0], roots[2], last])
    assert [one.root for one in compiler_caches.kept(base)] == [roots[0], roots[2], last]
    assert begun(base, 0, model="/3") == last
    assert [*base.iterdir()] == [last], "its own stays"


@pytest.mark.parametrize("kind", ["writable", "link"])
def test_a_directory_that_others_may_write_to_is_refused(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = tmp_path / "caches"
    if kind == "link":
        (tmp_path / "theirs").mkdir()
        base.symlink_to(tmp_path / "theirs")
    else:
        base.mkdir()
        base.chmod(0o777)
    with pytest.raises(EngineIncompatible, match="nobody else may write to"):
        compiler_caches.kept(base)
    before = dict(os.environ)
    compiler_caches.begin({DIRECTORY: str(base), MOST_BYTES: "1"}, {}, None)
    assert os.environ == before
    assert "is not kept" in caplog.text


def test_the_host_keeps_its_directory_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in double_environment(tmp_path / "journal").items():
        monkeypatch.setenv(name, value)
    base = tmp_path / "caches"
    options = {DIRECTORY: str(base), MOST_BYTES: "0"}
    with running(tmp_path, options):
        (root,) = base.iterdir()
        (root / "kernel").write_bytes(bytes(1000))
        begun(base, 0, model="/other")
        assert root.exists()
    begun(base, 0, model="/other")
    assert not root.exists()
