"""Pre-flight check: a wrong GPU, engine or library is refused before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tensorrt_llm_engines
from sample_engines import with_manifest

from cog_triton.artifact import compatibility
from cog_triton.artifact.compatibility import Machine
from cog_triton.errors import EngineCorrupt, EngineIncompatible
from cog_triton.system import gpus
from cog_triton.system.ports import free_ports


@pytest.mark.parametrize(
    ("image_sm", "found", "said"),
    [
        *((image_sm, None, "") for image_sm in (None, "", "cpu")),
        ("86", [86, 86], ""),
        ("80,86", [86, 100], "is for sm_80,86, this GPU is sm_100: use the image"),
        ("86", [86, 89], "for vLLM cog-triton-runner-vllm-89"),
        ("86", [75], "there are images for sm_80, sm_86, sm_89, sm_90, sm_100"),
        ("90", [], "no GPU here: start it with `docker run --gpus"),
    ],
)
def test_the_gpus_of_an_image(image_sm: str | None, found: list[int] | None, said: str) -> None:
    if not said:
        compatibility.require_gpu(image_sm, found)
        return
    with pytest.raises(EngineIncompatible) as caught:
        compatibility.require_gpu(image_sm, found)
    assert said in caught.value.detail
    assert "\n" not in caught.value.detail


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(gpus.ctypes, "CDLL", missing)
    assert gpus.visible_gpus() == gpus.gpu_names() == []


def test_serve_refuses_a_wrong_gpu_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text("{}")
    names = ("PORT", "OPENAI_PORT", *(f"TRITON_{k}_PORT" for k in ("HTTP", "GRPC", "METRICS")))
    ports = dict(zip(names, map(str, free_ports(5)), strict=True))
    done = subprocess.run(
        [sys.executable, "-m", "cog_triton", "serve", str(tmp_path)],
        # sm_1 is no GPU's, so the image is the wrong one on every machine.
        env={"COG_TRITON_SM": "1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **ports},
        cwd=Path(compatibility.__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: E1305 EngineIncompatible: this image is for sm_1")
    assert len(done.stderr.splitlines()) == 1


H200 = Machine(
    sm=(90, 90),
    tritonserver=Path("/opt/tritonserver/bin/tritonserver"),
    backends=("python", "tensorrtllm"),
    versions={"tensorrt_llm": "1.2.1", "tensorrt": "10.13.3.9"},
)
VERSIONS = {"tensorrt_llm": "1.2.1", "tensorrt": "10.13.3.9"}


def needs(**changes: object) -> compatibility.Needs:
    given = {"backend": "tensorrtllm", "world_size": 2, "sm": [90], "versions": VERSIONS}
    return compatibility.Needs(engine=Path("/engine"), **{**given, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"world_size": 4, "nodes": 2}, ""),
        ({"sm": [86]}, "built for sm_86, this machine has sm_90: build the engine on such a GPU"),
        ({"world_size": 4}, "/engine has 4 ranks, a GPU for each: 2 here"),
        ({"backend": "vllm"}, "has no vllm backend, it has python, tensorrtllm: use a runner"),
        (
            {"versions": {**VERSIONS, "tensorrt_llm": "0.9.0"}},
            "was built by TensorRT-LLM 0.9.0, here is TensorRT-LLM 1.2.1: rebuild the engine",
        ),
        (
            {"versions": {**VERSIONS, "tensorrt": "10.14.1.48"}},
            "was built by TensorRT 10.14.1.48, here is TensorRT 10.13.3.9",
        ),
    ],
)
def test_an_engine_is_compared(changes: dict[str, object], said: str) -> None:
    if not said:
        assert compatibility.require_engine(needs(**changes), H200) == []
        return
    with pytest.raises(EngineIncompatible) as caught:
        compatibility.require_engine(needs(**changes), H200)
    assert said in caught.value.detail
    assert "\n" not in str(caught.value)


def test_unknown_versions_give_a_remark() -> None:
    here = Machine((90, 90), H200.tritonserver, H200.backends, {"tensorrt": "10.13.3.9"})
    told = compatibility.require_engine(needs(sm=(), versions={"tensorrt_llm": "1.2.1"}), here)
    assert told == [
        "/engine: the GPU that it was built for is not recorded",
        "TensorRT-LLM's version of this machine is not known, so it was not compared",
        "TensorRT's version of the engine is not known, so it was not compared",
    ]


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        ("1.2.1", "1.2.1", False),
        ("1.2.1", "1.2.0", True),
        ("10.14.1", "10.14.1.48", False),
        ("0.9.0", "0.10.0", True),
    ],
)
def test_versions_are_compared_by_the_numbers_that_both_have(
    one: str, other: str, differ: bool
) -> None:
    assert compatibility._differ(one, other) is differ
    assert compatibility._differ(other, one) is differ


def test_the_manifest_overrides_the_engines_own_versions(tmp_path: Path) -> None:
    path = with_manifest(
        tensorrt_llm_engines.make(tmp_path / "engine"), sm=[86], versions={"tensorrt": "10.13"}
    )
    found = compatibility.needs_of(path, "tensorrtllm", 1, {"tensorrt_llm": "1.2.1"})
    assert found.sm == [86]
    assert found.versions == {"tensorrt_llm": "1.2.1", "tensorrt": "10.13"}


def test_sizes_are_compared_before_anything_is_loaded(tmp_path: Path) -> None:
    path = with_manifest(tensorrt_llm_engines.make(tmp_path / "engine"))
    (path / "rank0.engine").write_bytes(b"cut short")
    with pytest.raises(EngineCorrupt, match=r"rank0\.engine has 9 bytes, the manifest says"):
        compatibility.needs_of(path, "tensorrtllm", 1, {})


def test_library_versions_are_read_in_nvidias_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "usr/local/lib/python3.12/dist-packages"
    for name, version in (("tensorrt_llm", "1.2.1"), ("tensorrt", "10.1")):
        info = packages / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setenv("TRT_VERSION", "10.14.1.48")
    assert compatibility.library_versions(tmp_path) == {
        "tensorrt_llm": "1.2.1",
        "tensorrt": "10.14.1.48",
    }
    monkeypatch.delenv("TRT_VERSION")
    assert compatibility.library_versions(tmp_path)["tensorrt"] == "10.1"
    assert "tensorrt_llm" not in compatibility.library_versions(tmp_path / "none")
