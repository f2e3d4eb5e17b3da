"""NVIDIA's driver against the CUDA inside: the table, and starts of the real command line."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from cuda_driver import gpu_driver, has_compiler

from cog_triton.artifact import cuda_support
from cog_triton.errors import EngineIncompatible
from cog_triton.system.gpus import NVIDIADriver
from cog_triton.system.ports import free_ports

A100, RTX = "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090"
PATIENCE_S = 60
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")
OLD = {"driver": "550.90.07", "cuda": 12040}
IMAGE = {"CUDA_VERSION": "13.1.0", "COG_TRITON_SM": "90"}


@pytest.mark.parametrize(
    ("cuda", "driver", "its_cuda", "remark"),
    [
        ("13.1", "590.44", (13, 1), None),
        ("13.0.96", "580.65.06", (13, 0), None),
        ("12.8", "580.95.05", (13, 0), None),
        ("13.1", "580.95.05", (13, 0), "minor version compatibility"),
        ("12.8", "525.60.13", (12, 0), "minor version compatibility"),
        ("13.0", None, (13, 0), None),
        ("12.4", "550.54", None, None),
        ("13.0", None, None, "the one here is not known"),
        (None, "580.95.05", (13, 0), "not known, so the driver 580.95.05"),
        ("99.1", "580.95.05", None, "its CUDA is 99.1, so the driver"),
        ("99.1", "2000.1", (99, 0), "minor version compatibility"),
        ("9" * 5000, "580.95.05", None, "so the driver"),
    ],
)
def test_a_driver_of_the_same_major_version_is_taken(
    cuda: str | None, driver: str | None, its_cuda: tuple[int, int] | None, remark: str | None
) -> None:
    found = cuda_support.require_driver(cuda, NVIDIADriver(driver, its_cuda), "it")
    assert (found is None) == (remark is None)
    assert remark is None or remark in str(found)


@pytest.mark.parametrize(
    ("cuda", "driver", "its_cuda", "floor"),
    [
        ("13.0", "575.57.08", (12, 9), "580.65.06"),
        ("13.0", None, (12, 9), "580.65.06"),
        ("12.1", "470.57.02", (11, 4), "525.60.13"),
        ("11.8", "418.87", (10, 1), "450.80.02"),
        ("14.0", "590.44", (13, 1), "of CUDA 14"),
    ],
)
def test_an_older_driver_is_refused_with_both_versions(
    cuda: str, driver: str | None, its_cuda: tuple[int, int], floor: str
) -> None:
    with pytest.raises(EngineIncompatible) as caught:
        cuda_support.require_driver(cuda, NVIDIADriver(driver, its_cuda), "this image")
    for part in (f"CUDA {cuda}", f"driver {floor}", driver or "unknown version", "or older"):
        assert part in caught.value.detail


@pytest.mark.parametrize(
    ("driver", "gpu", "refused", "said"),
    [
        ("535.230.02", A100, False, "it goes by the image's forward compatibility"),
        ("550.90.07", A100, False, "it may go"),
        ("535.230.02", "NVIDIA RTX 6000 Ada Generation", False, "it may go"),
        ("535.230.02", RTX, True, f"not for {RTX}"),
        ("530.30.02", A100, True, "not for that, but for 470.57, 525.85, 535.86"),
        ("535.54.03", A100, True, "not for that"),
    ],
)
def test_forward_compatibility_is_for_some_drivers_of_data_centre_gpus(
    driver: str, gpu: str, refused: bool, said: str
) -> None:
    here = NVIDIADriver(driver, (12, 2))
    with pytest.raises(EngineIncompatible, match=said) if refused else nullcontext():
        found = cuda_support.require_driver("13.1", here, "it", [gpu], compat=True)
        assert said in str(found)


def test_cuda_of_packages_is_that_of_its_runtime(tmp_path: Path) -> None:
    assert cuda_support.cuda_of_packages([str(tmp_path)]) is None
    for name, version in (("nvidia_cuda_nvrtc", "1.2"), ("nvidia_cuda_runtime_cu12", "12.8.90")):
        made = tmp_path / f"{name}-{version}.dist-info" / "METADATA"
        made.parent.mkdir()
        made.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    assert cuda_support.cuda_of_packages([str(tmp_path)]) == "12.8.90"


def environment(tmp_path: Path, driver: dict[str, str], **more: str) -> dict[str, str]:
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "COG_TRITON_WORK_DIR": str(tmp_path / "work"),
        "HF_HUB_OFFLINE": "1",
        **driver,
        **more,
    }


def serve(tmp_path: Path, driver: dict[str, str], *arguments: str, **more: str) -> str:
    """What is said to stderr by a start that has to fail."""
    command = [sys.executable, "-m", "cog_triton", "serve", *arguments]
    names = (
        "PORT",
        "OPENAI_PORT",
        *(f"TRITON_{kind}_PORT" for kind in ("HTTP", "GRPC", "METRICS")),
    )
    ports = {name: str(port) for name, port in zip(names, free_ports(5), strict=True)}
    done = subprocess.run(
        command,
        env=environment(tmp_path, driver, **ports, **more),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1, done.stderr
    return done.stderr


def vllm_engine(tmp_path: Path) -> str:
    made = tmp_path / "engine"
    made.mkdir()
    (made / "model.json").write_text('{"model": "some/model", "nnodes": 2}')
    return str(made)


@needs_compiler
@pytest.mark.parametrize(
    ("cuda", "facts", "said"),
    [
        (False, {}, "there is no libcuda.so.1"),
        (True, {"cuinit": 100}, "CUDA finds no GPU"),
        (True, {"cuinit": 804}, "for data centre GPUs alone"),
        (True, {"cuinit": 803, **OLD}, "driver 550.90.07 (CUDA 12.4)"),
    ],
)
def test_a_gpu_that_cuda_cannot_use_never_means_the_cpu(
    cuda: bool, facts: dict[str, object], said: str, tmp_path: Path
) -> None:
    driver = gpu_driver(tmp_path / "driver", cuda, **facts)
    told = serve(tmp_path, driver, "some/model")
    assert told.startswith("error: E1305 EngineIncompatible: ")
    assert said in told
    assert "CUDA_VISIBLE_DEVICES= (empty) to serve on the CPU" in told
    if cuda:
        return
    for choice in ({"CUDA_VISIBLE_DEVICES": ""}, {"COG_TRITON_SM": "cpu"}):
        told = serve(tmp_path, driver, "some/model", **choice)
        assert "E1304 ModelUnavailable: some/model" in told


@needs_compiler
def test_a_start_under_an_old_driver_is_refused_first(tmp_path: Path) -> None:
    driver = gpu_driver(tmp_path / "driver", **OLD)
    told = serve(tmp_path, driver, vllm_engine(tmp_path), "--triton-only", **IMAGE)
    assert "this image has CUDA 13.1.0, which needs driver 580.65.06" in told
    assert not (tmp_path / "work").exists()


@needs_compiler
@pytest.mark.parametrize("name", ["model.gguf", "some/model"])
def test_what_needs_no_gpu_is_served_beside_one_that_cuda_cannot_use(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    family = ["--family", "openvino"] if name == "some/model" else []
    beside = gpu_driver(tmp_path / "driver", cuinit=803, **OLD)
    told = serve(tmp_path, beside, name, *family, CUDA_VERSION="13.1.0")
    assert "E1305" not in told
