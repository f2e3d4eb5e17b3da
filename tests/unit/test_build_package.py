"""Packaging of engine.tar: manifest, provenance, tokenizer and reproducibility."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from sample_engines import V0_9, V1, changed, directory

import cog_triton
from cog_triton.artifact.engine_manifest import Manifest
from cog_triton.artifact.engine_tar import unpack
from cog_triton.builder import package
from cog_triton.builder.config import BuildConfig, parse_config
from cog_triton.download.model_request import FetchedModel
from cog_triton.errors import BuildStepFailed
from cog_triton.system import terminal_progress

LATER = {"runtime", "lora_adapters", "seals", "variables", "weights", "seal_required"}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


class Driver:
    """Fake libcuda.so.1: GPUs by compute capability and name."""

    def __init__(self, *gpus: tuple[int, str]) -> None:
        self._gpus = gpus

    def __call__(self, name: str) -> Driver:
        if name != "libcuda.so.1":
            raise OSError(name)
        return self

    def __getitem__(self, name: str) -> Callable[..., int]:
        return getattr(self, f"_{name}")

    def _cuInit(self, _flags: int) -> int:  # noqa: N802
        return 0 if self._gpus else 100

    def _cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self._gpus)
        return 0

    def _cuDeviceGetAttribute(self, value: Any, attribute: int, index: int) -> int:  # noqa: N802
        value._obj.value = divmod(self._gpus[index][0], 10)[{75: 0, 76: 1}[attribute]]
        return 0

    def _cuDeviceGetName(self, text: Any, size: int, index: int) -> int:  # noqa: N802
        assert ctypes.sizeof(text) == size
        text.value = self._gpus[index][1].encode()
        return 0


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Without GPU or TensorRT, until it is called with what there is."""

    def gpus(*found: tuple[int, str]) -> None:
        monkeypatch.setattr(ctypes, "CDLL", Driver(*found))

    gpus()
    return gpus


def config(**changes: Any) -> BuildConfig:
    value = {
        "model_id": "Qwen/Qwen3-8B",
        "example_name": "openvino",
        "build": {"script": "build.py", "output_dir": "engine"},
        **changes,
    }
    return parse_config(yaml.safe_dump(value), "test")


def model(path: Path, *names: str) -> Path:
    path.mkdir()
    for name in (*names, "config.json", "model.safetensors"):
        (path / name).write_text(f"model's {name}")
    return path


def written(
    tmp_path: Path,
    engine: Path,
    model_dir: Path | None = None,
    name: str = "engine.tar",
    revision: str | None = None,
    **changes: Any,
) -> tuple[Manifest, list[str]]:
    """The manifest of the tar, which is unpacked in ``out``, and what was echoed before."""
    lines: list[str] = []
    source = FetchedModel(model_dir or model(tmp_path / "model", *TOKENIZER), revision)
    root = Path(tempfile.mkdtemp(dir=tmp_path))
    package.lay_out(config(**changes), engine, source, root, echo=lines.append)
    package.pack(root / package.ENGINE, tmp_path / name, lines.append)
    lines.remove(f"[package] {tmp_path / name}")
    manifest = unpack(tmp_path / name, tmp_path / "out")
    assert manifest is not None
    return manifest, lines


def python_with(tmp_path: Path, **distributions: str) -> Path:
    """A Python of its own, in which these are installed; `__` in a name stands for a dash."""
    site = tmp_path / "site"
    for name, version in distributions.items():
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        )
    python = tmp_path / "python3"
    python.write_text(
        f'#!/bin/sh\nexport PYTHONPATH="$PYTHONPATH:{site}"\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return python


def test_manifest_of_a_tensorrt_llm_engine(
    machine: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine((90, "NVIDIA H200"), (90, "NVIDIA H200"))
    python = python_with(
        tmp_path, tensorrt_llm="1.2.1", tensorrt="10.13.3.9", nvidia_cuda_runtime="13.0.48"
    )
    monkeypatch.setenv("COG_TRITON_STEP_PYTHON", str(python))
    manifest, lines = written(tmp_path, directory(tmp_path / "engine", V1, 4), revision="abc")
    assert manifest.model_dump(exclude={"files", "config_sha256", "schema_", *LATER}) == {
        "engine": "tensorrt_llm",
        "model_id": "Qwen/Qwen3-8B",
        "revision": "abc",
        "sm": [90],
        "gpu_name": "NVIDIA H200",
        "versions": {
            "cog_triton": cog_triton.__version__,
            "cuda": "13.0.48",
            "tensorrt": "10.13.3.9",
            "tensorrt_llm": "1.2.1",
        },
        "world_size": 4,
        "max_input_len": 4096,
        "max_seq_len": 8192,
        "max_batch_size": 64,
    }
    assert lines == []
    assert set(manifest.files) == {
        *(f"rank{rank}.engine" for rank in range(4)),
        "config.json",
        "build_config.yaml",
        *TOKENIZER,
    }


def test_max_seq_len_of_a_0_9_engine_is_a_sum(tmp_path: Path) -> None:
    manifest, _ = written(tmp_path, directory(tmp_path / "engine", V0_9, 2))
    assert (manifest.max_input_len, manifest.max_seq_len, manifest.world_size) == (1024, 1536, 2)
    assert manifest.versions["tensorrt_llm"] == "0.9.0"


@pytest.mark.parametrize(
    ("gpus", "sm", "name"),
    [
        ([(86, "NVIDIA A10")], [86], "NVIDIA A10"),
        ([(90, "B"), (86, "A"), (90, "B")], [86, 90], "A, B"),
        ([(120, "NVIDIA RTX PRO 6000")], [120], "NVIDIA RTX PRO 6000"),
    ],
)
def test_gpus_come_from_the_driver(
    gpus: list[tuple[int, str]],
    sm: list[int],
    name: str,
    machine: Callable[..., None],
    tmp_path: Path,
) -> None:
    machine(*gpus)
    manifest, _ = written(tmp_path, directory(tmp_path / "engine", V0_9, 2))
    assert (manifest.sm, manifest.gpu_name) == (sm, name)


def test_missing_gpu_gives_a_warning_and_no_sm(tmp_path: Path) -> None:
    manifest, lines = written(tmp_path, directory(tmp_path / "engine", V0_9, 2))
    assert (manifest.sm, manifest.gpu_name) == ([], None)
    assert lines == [
        "[engine] warning: no GPU here: the manifest cannot say which one the engine is for"
    ]


def test_cpu_engine_has_no_gpu_and_keeps_its_tokenizer(
    machine: Callable[..., None], tmp_path: Path
) -> None:
    machine((90, "NVIDIA H200"))
    described = changed(changed(V1, "engine", "openvino"), "pretrained_config.mapping", {})
    engine = directory(tmp_path / "engine", described, 0)
    for suffix in ("xml", "bin"):
        (engine / f"openvino_model.{suffix}").write_text("x")
    manifest, lines = written(tmp_path, engine)
    assert (manifest.sm, manifest.gpu_name, manifest.world_size) == ([], None, 1)
    assert set(manifest.versions) == {"cog_triton", "openvino", "openvino_genai"}
    assert "generation_config.json" not in manifest.files
    (line,) = lines
    assert "no canary, as the engine does not answer here" in line


@pytest.mark.parametrize(
    ("installed", "variables", "tensorrt", "cuda"),
    [
        ({"tensorrt_cu12": "10.3.0", "nvidia_cuda_runtime_cu12": "12.4.127"}, {}, "10.3.0", "12.4"),
        ({"tensorrt_cu13": "10.14.1"}, {"CUDA_VERSION": "13.0.1.012"}, "10.14.1", "13.0.1.012"),
        ({}, {"TRT_VERSION": "10.13.3.9", "CUDA_VERSION": "13.0.1"}, "10.13.3.9", "13.0.1"),
        ({"tensorrt": "10.9"}, {"TRT_VERSION": "10.8"}, "10.9", None),
        ({}, {"TRT_VERSION": ""}, None, None),
    ],
)
def test_versions_come_from_the_step_python_then_the_image(
    installed: dict[str, str],
    variables: dict[str, str],
    tensorrt: str | None,
    cuda: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COG_TRITON_STEP_PYTHON", str(python_with(tmp_path, **installed)))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    versions = written(tmp_path, directory(tmp_path / "engine", V1, 4))[0].versions
    assert versions.get("tensorrt") == tensorrt
    assert (versions.get("cuda") or "").startswith(cuda or "")
    assert ("cuda" in versions) == (cuda is not None)
    assert versions["tensorrt_llm"] == "1.2.1"


def test_mismatched_tensorrt_llm_version_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COG_TRITON_STEP_PYTHON", str(python_with(tmp_path, tensorrt_llm="1.2.0")))
    manifest, lines = written(tmp_path, directory(tmp_path / "engine", V1, 4))
    assert manifest.versions["tensorrt_llm"] == "1.2.1"
    assert (
        "[engine] warning: the engine is of TensorRT-LLM 1.2.1, the Python of the steps has 1.2.0"
    ) in lines


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo broken >&2; exit 3", "exit status 3.*broken"),
        ("echo no json", "the Python of the steps tells no versions: 'no json'"),
        ("true", "python3 does not tell"),
    ],
)
def test_failing_step_python_is_named(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\n{text}\n")
    python.chmod(0o755)
    monkeypatch.setenv("COG_TRITON_STEP_PYTHON", str(python))
    with pytest.raises(BuildStepFailed, match=said):
        written(tmp_path, directory(tmp_path / "engine", V1, 4))
    assert not (tmp_path / "engine.tar").exists()


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (3, "rank3.engine is missing: config.json says tp 2 x pp 2 x cp 1 = 4, there are 3 rank"),
        (5, "rank4.engine is one too many: config.json says .* = 4, there are 5 rank"),
        (0, "rank0.engine is missing: .* = 4, there are 0 rank"),
    ],
)
def test_ranks_are_counted(ranks: int, said: str, tmp_path: Path) -> None:
    with pytest.raises(BuildStepFailed, match=said):
        written(tmp_path, directory(tmp_path / "engine", V1, ranks))
    assert not (tmp_path / "engine.tar").exists()


def test_ranks_must_be_contiguous_from_0(tmp_path: Path) -> None:
    engine = directory(tmp_path / "engine", V1, 4)
    (engine / "rank1.engine").rename(engine / "rank7.engine")
    with pytest.raises(BuildStepFailed, match=r"rank1.engine is missing: .* = 4, there are 4"):
        written(tmp_path, engine)


def test_ranks_must_match_the_build_config(tmp_path: Path) -> None:
    engine = directory(tmp_path / "engine", V1, 4)
    written(tmp_path, engine, tmp_path, world_size=4)
    with pytest.raises(BuildStepFailed, match=r"has 4 ranks, the build config's world_size is 2$"):
        written(tmp_path, engine, tmp_path, world_size=2)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("build_config.max_batch_size", "8", "build_config.max_batch_size: '8'"),
        ("build_config", {}, "build_config.max_input_len: missing"),
        ("version", None, "version: None"),
        ("pretrained_config.mapping.world_size", 3, "world_size must be tp_size x pp_size"),
    ],
)
def test_incomplete_engine_config_is_reported(
    path: str, value: Any, said: str, tmp_path: Path
) -> None:
    engine = directory(tmp_path / "engine", changed(V1, path, value), 4)
    with pytest.raises(BuildStepFailed, match=said):
        written(tmp_path, engine)
    (engine / "config.json").unlink()
    with pytest.raises(BuildStepFailed, match=r"config.json: cannot be read: No such file"):
        written(tmp_path, engine, tmp_path)


def test_tokenizer_is_taken_from_the_model_if_the_engine_has_none(tmp_path: Path) -> None:
    engine = directory(tmp_path / "engine", V1, 4)
    names = (*TOKENIZER, "chat_template.jinja", "special_tokens_map.json", "vocab.json")
    manifest, _ = written(tmp_path, engine, model(tmp_path / "hub", *names))
    assert set(names[:-1]) <= set(manifest.files)
    assert not {"vocab.json", "model.safetensors"} & set(manifest.files)
    out = tmp_path / "out"
    assert (out / "tokenizer.json").read_text() == "{}"  # the engine's own
    assert (out / "tokenizer_config.json").read_text() == "model's tokenizer_config.json"
    assert json.loads((out / "config.json").read_text()) == V1


def test_slow_tokenizer_is_packed_with_a_warning(tmp_path: Path) -> None:
    engine = directory(tmp_path / "engine", V1, 4)
    (engine / "tokenizer.json").unlink()
    names = ("tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt")
    manifest, lines = written(tmp_path, engine, model(tmp_path / "hub", *names))
    assert set(names) <= set(manifest.files)
    assert lines[0] == (
        "[engine] warning: neither engine nor model has tokenizer.json, which a runner needs"
    )


def test_model_file_has_no_tokenizer_files(tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_text("")
    manifest, _ = written(tmp_path, directory(tmp_path / "engine", V1, 4), gguf)
    assert "tokenizer_config.json" not in manifest.files


def test_build_config_is_packed_with_its_checksum(tmp_path: Path) -> None:
    engine = directory(tmp_path / "engine", V1, 4)
    (engine / "cog-triton.json").write_text("of an earlier build")
    manifest, _ = written(tmp_path, engine)
    assert (tmp_path / "out" / "build_config.yaml").read_text() == config().to_yaml()
    assert manifest.config_sha256 == manifest.files["build_config.yaml"].sha256
    assert "cog-triton.json" not in manifest.files


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tar.zst"])
def test_packing_is_reproducible(name: str, tmp_path: Path) -> None:
    engine = directory(tmp_path / "engine", V1, 4)
    written(tmp_path, engine, name=name)
    first = (tmp_path / name).read_bytes()
    written(tmp_path, engine, tmp_path / "model", name=f"another-{name}")
    assert (tmp_path / f"another-{name}").read_bytes() == first


def test_packing_that_takes_long_reports_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = directory(tmp_path / "engine", V0_9, 2)
    os.truncate(engine / "rank1.engine", 30 << 20)
    assert not any("%" in line for line in written(tmp_path, engine)[1])
    monkeypatch.setattr(package, "_SAID_EVERY_S", 0.0)
    lines = written(tmp_path, engine, tmp_path / "model")[1][1:]
    assert lines[-1] == "[package] 100% of 31 MB"
    shares = [int(line.removeprefix("[package] ").removesuffix("% of 31 MB")) for line in lines]
    assert shares == sorted(shares)
    assert len(set(shares)) > 10
    assert package._SAID_EVERY_S < terminal_progress.QUIET_S
