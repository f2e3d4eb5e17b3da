"""``cog-triton doctor``: checks of machines of all kinds."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sample_engines
from command_line import ran
from cuda_driver import gpu_driver, has_compiler
from registry_double import RegistryDouble, digest_of
from rich.console import Console

from cog_triton.doctor import machine as machines
from cog_triton.doctor import report, run_checks
from cog_triton.doctor.report import Check, State
from cog_triton.doctor.run_checks import Target
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


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")

NEW = {"driver": "590.44.01", "cuda": 13010}
T4 = {"gpu_name": "Tesla T4", "gpu_sm": 75, "gpu_mib": 15360, **NEW}
L4 = {"gpu_name": "NVIDIA L4", "gpu_sm": 89, "gpu_mib": 23034, **NEW}
A100 = {
    **{"gpu_name": "NVIDIA A100-SXM4-80GB", "gpu_sm": 80, "gpu_mib": 81920},
    **{"driver": "535.230.02", "cuda": 12020},
}
H100 = {"gpu_name": "NVIDIA H100 80GB HBM3", "gpu_sm": 90, "gpu_mib": 81559, **NEW}
RTX = {
    **{"gpu_name": "NVIDIA GeForce RTX 4090", "gpu_sm": 89, "gpu_mib": 24564},
    **{"driver": "535.230.02", "cuda": 12020},
}


def doctor_for(
    tmp_path: Path, facts: dict[str, Any], *arguments: str
) -> tuple[int, dict[str, Any]]:
    """Exit code and checks by name."""
    environment = {
        **{"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        **{"COG_TRITON_WORK_DIR": str(tmp_path / "work")},
        **gpu_driver(tmp_path / f"driver-{len(list(tmp_path.iterdir()))}", **facts),
    }
    command = [sys.executable, "-m", "cog_triton", "doctor", "--json", "--for", *arguments]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert done.returncode == (not told["healthy"])
    return done.returncode, {check["name"]: check for check in told["checks"]}


def model(tmp_path: Path, layers: int = 32, length: int = 131072) -> str:
    """A model of 8 billion weights, by its config.json."""
    made = tmp_path / "model"
    made.mkdir()
    config = {
        **{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "vocab_size": 128256},
        **{"intermediate_size": 14336, "num_hidden_layers": layers, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "max_position_embeddings": length},
    }
    (made / "config.json").write_text(json.dumps(config))
    return str(made)


@pytest.mark.parametrize(
    ("facts", "state", "said"),
    [
        (T4, "fail", "must be sm_80 (A100) or later"),
        (L4, "ok", "fits 1 of 1 x NVIDIA L4 with FP8 weights"),
        ({**L4, "gpu_free_mib": 6000}, "fail", "Others hold 16.6 GiB of it. It would fit 1 x"),
        ({**H100, "gpu_free_mib": 60000}, "warn", "others hold 21.1 GiB of the GPU"),
    ],
)
@needs_compiler
def test_a_model_is_compared_with_the_free_memory(
    facts: dict[str, Any], state: str, said: str, tmp_path: Path
) -> None:
    code, found = doctor_for(tmp_path, facts, model(tmp_path))
    assert (found["model"]["state"], code) == (state, int(state == "fail"))
    assert said in found["model"]["found"]
    if state == "warn":
        assert "set gpu_memory_utilization to 0.73" in found["model"]["advice"]
    if state == "ok" and facts is L4:
        assert "the largest max_model_len is" in found["model"]["found"]


def image(double: RegistryDouble, layer: bytes = b"x" * 1000, **config: Any) -> str:
    """An image for H100 at a registry; returns its name."""
    labels = {"cog-triton.sm": "90", "cog-triton.cuda": "13.1", "cog-triton.driver": ">=590.44"}
    value = {"config": {"Labels": labels, **config}, "rootfs": {"type": "layers", "diff_ids": []}}
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": double.add(
            json.dumps(value).encode(), "application/vnd.oci.image.config.v1+json"
        ),
        "layers": [double.add(layer), double.add(layer)],
    }
    double.manifests["v1"] = json.dumps(manifest).encode()
    return f"{double.address}/me/llm:v1"


COMPAT = {"Env": ["_CUDA_COMPAT_PATH=/usr/local/cuda/compat"]}


@pytest.mark.parametrize(
    ("facts", "config", "driver", "gpu", "said"),
    [
        (H100, {}, "ok", "ok", "driver 590.44.01 (CUDA 13.1); image has CUDA 13.1"),
        ({**H100, "driver": "580.95", "cuda": 13000}, {}, "warn", "ok", "minor version"),
        (A100, {}, "fail", "fail", "needs driver 580.65.06 or newer; here is driver 535.230.02"),
        (RTX, COMPAT, "fail", "fail", "not for NVIDIA GeForce RTX 4090, but for data centre"),
    ],
)
@needs_compiler
def test_an_image_is_compared_by_its_labels(
    facts: dict[str, Any],
    config: dict[str, Any],
    driver: str,
    gpu: str,
    said: str,
    double: RegistryDouble,
    tmp_path: Path,
) -> None:
    _, found = doctor_for(tmp_path, facts, image(double, **config))
    assert (found["CUDA driver"]["state"], found["GPU"]["state"]) == (driver, gpu)
    assert said in found["CUDA driver"]["found"]
    assert "an image names no model" in found["memory of the GPU"]["found"]
    assert "GB to fetch, 0.0 GB unpacked" in found["disk for it"]["found"]
    assert len({one.path for one in double.seen if "blobs" in one.path}) == 1  # no layer


@needs_compiler
def test_an_index_is_followed_to_linux_amd64(double: RegistryDouble, tmp_path: Path) -> None:
    name = image(double)
    body = double.manifests["v1"]
    digest = digest_of(body)
    double.manifests[digest] = body
    platforms = [("arm64", "sha256:" + "0" * 64), ("amd64", digest)]
    entries = [
        {"digest": its, "platform": {"os": "linux", "architecture": kind}}
        for kind, its in platforms
    ]
    double.manifests["v1"] = json.dumps({"schemaVersion": 2, "manifests": entries}).encode()
    assert doctor_for(tmp_path, H100, name)[0] == 0
    astray = {**entries[1], "digest": "../blobs/" + digest}
    double.manifests["v1"] = json.dumps({"manifests": [astray]}).encode()
    asked = len(double.seen)
    _, found = doctor_for(tmp_path, H100, name)
    assert "is no image: manifests.0.digest" in found["engine"]["found"]
    assert len(double.seen) <= asked + 2  # a token, and the index: not where that points


@needs_compiler
def test_a_pointer_of_git_lfs_is_no_weight(tmp_path: Path) -> None:
    directory = Path(model(tmp_path))
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 16060522496\n"
    (directory / "model.safetensors").write_text(pointer)
    _, found = doctor_for(tmp_path, H100, str(directory))
    assert "model.safetensors: is Git LFS's pointer" in found["model"]["found"]
    assert "git lfs pull" in found["model"]["found"]


@pytest.mark.parametrize(
    ("unpacked", "free", "state"), [(50, 200, "ok"), (250, 200, "fail"), (None, 200, "fail")]
)
def test_the_disk_holds_fetch_and_unpacking(
    unpacked: int | None,
    free: int,
    state: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = shutil.disk_usage("/")._replace(free=free * 10**9)
    monkeypatch.setattr(run_checks.shutil, "disk_usage", lambda _path: usage)
    size = None if unpacked is None else unpacked * 10**9
    wanted = Target(
        name="x", what="image", pull=100 * 10**9, unpacked=size, place=tmp_path / "not" / "yet"
    )
    found = run_checks.disk(wanted)
    assert found.state.value == state
    assert ("compressed layers do not tell" in found.found) is (unpacked is None)
