"""``cog-triton doctor``: checks of machines of all kinds."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sample_engines
from command_line import ran
from rich.console import Console

from cog_triton.artifact.compatibility import Machine
from cog_triton.doctor import machine as machines
from cog_triton.doctor import report, run_checks
from cog_triton.doctor.report import Check, State
from cog_triton.errors import EngineIncompatible
from cog_triton.settings import load_settings
from cog_triton.sizing import gpu_table
from cog_triton.sources.source import Source
from cog_triton.system.host_memory import HostMemory
from cog_triton.system.ports import free_ports
from cog_triton.triton.installation import TritonInstallation


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COG_TRITON_WORK_DIR", str(tmp_path / "work"))
    for name, port in zip(("http", "grpc", "metrics"), free_ports(3), strict=True):
        monkeypatch.setenv(f"TRITON_{name.upper()}_PORT", str(port))
    for name, port in zip(("PORT", "OPENAI_PORT"), free_ports(2), strict=True):
        monkeypatch.setenv(name, str(port))


def doctor(*arguments: object) -> tuple[int, str]:
    result = ran("doctor", *arguments)
    return result.exit_code, result.output


def test_what_a_terminal_obeys_is_told_as_text() -> None:
    for terminal in (False, True):
        console = Console(file=io.StringIO(), width=200, force_terminal=terminal, no_color=True)
        report.print_to(console, [report.fail("GPU", "sm_\x1b]0;x\x07", "y\x9b")])
        assert isinstance(console.file, io.StringIO)
        assert "sm_\\x1b]0;x\\x07" in console.file.getvalue()
        assert "y\\x9b" in console.file.getvalue()


def binary(directory: Path, script: str) -> TritonInstallation:
    path = directory / "bin" / "tritonserver"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return TritonInstallation(path, directory / "backends", dict(os.environ))


def test_a_tritonserver_with_missing_libraries_fails(tmp_path: Path) -> None:
    triton = binary(tmp_path, "echo 'libfoo.so: cannot open shared object file' >&2; exit 127")
    found = machines.tritonserver(triton)
    assert found.state is State.FAIL
    assert "libfoo.so" in found.found


@pytest.mark.parametrize(
    ("image", "here", "state", "says"),
    [
        ("90", [], "fail", "no GPU here"),
        (None, [86, 90], "ok", "sm_86, sm_90"),
        (None, EngineIncompatible("CUDA error 803"), "fail", "CUDA error 803"),
    ],
)
def test_gpus_are_checked_against_the_image(
    image: str | None, here: Any, state: str, says: str
) -> None:
    found = machines.gpu(image, here)
    assert found.state.value == state
    assert says in found.found


def test_leftover_shared_memory_of_dead_servers_is_a_warning(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / f"cog_triton_{dead.pid}_ab12_x").write_bytes(b"x" * 2_000_000)
    (tmp_path / f"cog_triton_{os.getpid()}_ab12_x").write_bytes(b"x")
    found = machines.shared_memory(1, tmp_path)
    assert found.state is State.WARN
    assert "left 2.0 MB" in found.found
    assert found.advice == f"rm -r {tmp_path}/cog_triton_{dead.pid}_*"
    assert machines.shared_memory(1, tmp_path / "none").state is State.FAIL


@pytest.mark.parametrize("name", ["TRITON_GRPC_PORT", "OPENAI_PORT"])
def test_a_taken_port_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv(name, str(port))
        code, said = doctor()
    assert code == 1
    assert f"fail  port {port}: 127.0.0.1:{port}: Address already in use" in said
    assert f"set {name}=" in said


@pytest.mark.parametrize(
    ("name", "ours"),
    [("cog_triton.front.server", True), ("another", False)],
)
def test_ports_of_our_own_server_are_no_failure(
    name: str, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As gRPC's, of several ranks: of a process below the server.
    child = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0));"
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", parent, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout
        port = int(server.stdout.readline())
        monkeypatch.setenv("TRITON_GRPC_PORT", str(port))
        code, said = doctor()
        server.communicate()
    assert code == (0 if ours else 1)
    assert (f"{port} in use by cog-triton (process {server.pid})" in said) is ours
    assert (f"fail  port {port}" in said) is not ours


def test_mpirun_is_needed_only_for_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machines.mpirun(load_settings(), 1).state is State.OK
    missing = machines.mpirun(load_settings(), 2)
    assert (missing.state, "openmpi-bin" in missing.advice) == (State.FAIL, True)
    path = tmp_path / "mpirun"
    path.write_text("#!/bin/sh\necho 'libmpi.so: not found' >&2; exit 127")
    path.chmod(0o755)
    assert "libmpi.so: not found" in machines.mpirun(load_settings(), 2).found
    path.write_text("#!/bin/sh\n")
    assert machines.mpirun(load_settings(), 2) == Check("mpirun", State.OK, str(path))


FULL = {"tensorrt_llm": "1.2.1", "tensorrt": "10.13.2"}


@pytest.mark.parametrize(
    ("sm", "versions", "state", "said"),
    [
        ([90] * 4, FULL, "ok", "tensorrtllm backend, 4 ranks; it fits"),
        ([90] * 4, {}, "warn", "is not known, so it was not compared"),
        ([86], {}, "fail", "was built for sm_90, this machine has sm_86"),
        (None, {}, "warn", "not compared"),
    ],
)
def test_an_engine_is_compared_with_this_machine(
    sm: list[int] | None, versions: dict[str, str], state: str, said: str, tmp_path: Path
) -> None:
    here = sm and Machine(sm, Path("/opt/tritonserver"), ["python", "tensorrtllm"], versions)
    _, found = run_checks.engine(Source.open(str(sample_engines.packed(tmp_path))), here or None)
    assert found.state.value == state, found
    assert said in found.found


MODEL = {
    **{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
}


@pytest.mark.parametrize(
    ("layers", "state", "said"),
    [
        (2, "ok", "no GPU. It would fit 1 x "),
        (32000, "fail", "no GPU. No 8 GPUs of one kind hold it"),
    ],
)
def test_a_model_is_compared_with_a_machine_without_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int, state: str, said: str
) -> None:
    monkeypatch.setattr(gpu_table, "gpu_here", lambda: None)
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": layers}))
    found = run_checks.memory(run_checks.target(Source.open(str(tmp_path)), tmp_path))
    assert (found.state.value, found.advice == "") == (state, state == "ok")
    assert said in found.found


@pytest.mark.parametrize(
    ("setting", "value", "name", "failed", "said"),
    [
        ("WORLD_SIZE", "many", None, "settings", "WORLD_SIZE='many'"),
        ("COG_TRITON_CONFIG", "none.yaml", None, "settings", "none.yaml"),
        ("TRITONSERVER", "/nowhere/tritonserver", None, "Triton", "/nowhere/tritonserver"),
        ("MPIRUN", "/nowhere/mpirun", "engine.tar", "mpirun", "/nowhere/mpirun"),
        ("COG_WEIGHTS", "a.tar", None, "engine", "E1306"),
    ],
)
def test_a_wrong_setting_or_engine_fails_its_check(
    setting: str,
    value: str,
    name: str | None,
    failed: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(setting, value)
    sample_engines.packed(tmp_path)
    Path("a.tar").write_bytes(b"x" * 4096)
    code, output = doctor("--json", *([name] if name else []))
    found = {check["name"]: check for check in json.loads(output)["checks"]}
    assert (code, found[failed]["state"]) == (1, "fail")
    assert said in found[failed]["found"]


def test_this_machine_passes(tmp_path: Path) -> None:
    code, said = doctor("--json")
    found = json.loads(said)
    assert (code, found["healthy"]) == (0, True)
    names = [item["name"] for item in found["checks"]]
    assert names[:2] == ["Python", "settings"]
    assert {"Triton", "backends", "GPU", "memory", "shared memory", "disk", "ports"} <= {*names}
    for item in found["checks"]:
        assert (item["state"] == "ok") == (item["advice"] == "")
    lines = doctor()[1].splitlines()
    assert lines[0].startswith("ok    Python: 3.")
    assert lines[-1].startswith("Ready to serve")
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("check", "state", "said"),
    [
        (lambda: machines.memory(HostMemory(8 * 10**9, "max")), "ok", "8.0 GB free (max)"),
        (lambda: machines.memory(HostMemory(10**8, "max")), "fail", "0.1 GB free"),
        (lambda: machines.disk(Path("/tmp/not/yet"), 10**18), "fail", "GB needed"),
    ],
)
def test_free_memory_and_disk_have_limits(
    check: Callable[[], Check], state: str, said: str
) -> None:
    found = check()
    assert found.state.value == state
    assert said in found.found
