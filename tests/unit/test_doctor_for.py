"""`cog-triton doctor --for`: the real command line under a fake driver and GPUs of five kinds."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import sample_engines
from cuda_driver import gpu_driver, has_compiler
from http_replies import while_serving
from registry_double import RegistryDouble, digest_of

from cog_triton.doctor import run_checks
from cog_triton.doctor.run_checks import Target

pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")

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


def doctor(tmp_path: Path, facts: dict[str, Any], *arguments: str) -> tuple[int, dict[str, Any]]:
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
def test_a_model_is_held_against_what_is_free(
    facts: dict[str, Any], state: str, said: str, tmp_path: Path
) -> None:
    code, found = doctor(tmp_path, facts, model(tmp_path))
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
def test_an_image_is_judged_by_its_labels(
    facts: dict[str, Any],
    config: dict[str, Any],
    driver: str,
    gpu: str,
    said: str,
    double: RegistryDouble,
    tmp_path: Path,
) -> None:
    _, found = doctor(tmp_path, facts, image(double, **config))
    assert (found["CUDA driver"]["state"], found["GPU"]["state"]) == (driver, gpu)
    assert said in found["CUDA driver"]["found"]
    assert "an image names no model" in found["memory of the GPU"]["found"]
    assert "GB to fetch, 0.0 GB unpacked" in found["disk for it"]["found"]
    assert len({one.path for one in double.seen if "blobs" in one.path}) == 1  # no layer


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
    assert doctor(tmp_path, H100, name)[0] == 0
    astray = {**entries[1], "digest": "../blobs/" + digest}
    double.manifests["v1"] = json.dumps({"manifests": [astray]}).encode()
    asked = len(double.seen)
    _, found = doctor(tmp_path, H100, name)
    assert "is no image: manifests.0.digest" in found["engine"]["found"]
    assert len(double.seen) <= asked + 2  # a token, and the index: not where that points


@pytest.mark.parametrize(
    ("name", "check", "said"),
    [
        ("x.tar", "engine", "E1306"),
        ("URL/engine.tar", "GPU", "was built for sm_90, this machine has sm_80"),
        ("a.gguf", "memory of the GPU", "a GGUF file is for the CPU"),
    ],
)
def test_what_serve_takes_is_checked(name: str, check: str, said: str, tmp_path: Path) -> None:
    sample_engines.packed(tmp_path)
    (tmp_path / "x.tar").write_bytes(b"x" * 4096)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with while_serving(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as url:
        code, found = doctor(tmp_path, A100, name.replace("URL", url))
    assert said in found[check]["found"]
    assert code == (check != "memory of the GPU")


def test_a_pointer_of_git_lfs_is_no_weight(tmp_path: Path) -> None:
    directory = Path(model(tmp_path))
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 16060522496\n"
    (directory / "model.safetensors").write_text(pointer)
    _, found = doctor(tmp_path, H100, str(directory))
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
