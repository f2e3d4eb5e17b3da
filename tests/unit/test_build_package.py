"""Packaging of engine.tar: manifest, provenance, tokenizer, canary and adapters."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from hub_server import ID, ask_hub, serving_hub
from lora_adapters import adapter
from sample_engines import V0_9, V1, changed, directory

import cog_triton
from cog_triton.artifact import canary
from cog_triton.artifact.canary import CANARY_NAME, Canary
from cog_triton.artifact.engine_manifest import Manifest
from cog_triton.artifact.engine_tar import unpack
from cog_triton.artifact.lora_adapter import CONVERTED_FILES, read_adapter
from cog_triton.builder import package, packed_adapters
from cog_triton.builder.config import BuildConfig, parse_config
from cog_triton.builder.package import canary_of
from cog_triton.download.model_request import FetchedModel
from cog_triton.engines.tensorrt_llm.adapter_tensors import to_tensors
from cog_triton.errors import (
    BuildConfigInvalid,
    BuildStepFailed,
    CanaryFailed,
    CogTritonError,
    EngineCorrupt,
    EngineIncompatible,
    ModelUnavailable,
    TritonTimeout,
)
from cog_triton.serving.runtime import check_canary
from cog_triton.system import terminal_progress

LATER = {"runtime", "lora_adapters", "seals", "variables", "weights", "seal_required"}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Without GPU or TensorRT, until it is called with what there is."""

    def gpus(*found: tuple[int, str]) -> None:
        monkeypatch.setattr(package, "visible_gpus", lambda: [sm for sm, _ in found])
        monkeypatch.setattr(package, "gpu_names", lambda: [name for _, name in found])

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
    machine((90, "NVIDIA H200"), (90, "NVIDIA H200"), (86, "A10"))
    python = python_with(
        tmp_path, tensorrt_llm="1.2.1", tensorrt="10.13.3.9", nvidia_cuda_runtime="13.0.48"
    )
    monkeypatch.setenv("COG_TRITON_STEP_PYTHON", str(python))
    manifest, lines = written(tmp_path, directory(tmp_path / "engine", V1, 4), revision="abc")
    assert manifest.model_dump(exclude={"files", "config_sha256", "schema_", *LATER}) == {
        "engine": "tensorrt_llm",
        "model_id": "Qwen/Qwen3-8B",
        "revision": "abc",
        "sm": [86, 90],
        "gpu_name": "A10, NVIDIA H200",
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
        ({"tensorrt": "10.9"}, {"TRT_VERSION": "10.8"}, "10.9", None),
        ({}, {"TRT_VERSION": "10.13.3.9", "CUDA_VERSION": "13.0.1"}, "10.13.3.9", "13.0.1"),
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
    ("ranks", "said"), [(3, "rank3.engine is missing"), (5, "rank4.engine is one too many")]
)
def test_ranks_are_counted(ranks: int, said: str, tmp_path: Path) -> None:
    with pytest.raises(BuildStepFailed, match=said):
        written(tmp_path, directory(tmp_path / "engine", V1, ranks))
    assert not (tmp_path / "engine.tar").exists()


def test_ranks_must_match_the_build_config(tmp_path: Path) -> None:
    engine = directory(tmp_path / "engine", V1, 4)
    written(tmp_path, engine, tmp_path, world_size=4)
    with pytest.raises(BuildStepFailed, match=r"has 4 ranks, the build config's world_size is 2$"):
        written(tmp_path, engine, tmp_path, world_size=2)


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


def test_build_config_is_packed_with_its_checksum(tmp_path: Path) -> None:
    engine = directory(tmp_path / "engine", V1, 4)
    (engine / "cog-triton.json").write_text("of an earlier build")
    manifest, _ = written(tmp_path, engine)
    assert (tmp_path / "out" / "build_config.yaml").read_text() == config().to_yaml()
    assert manifest.config_sha256 == manifest.files["build_config.yaml"].sha256
    assert "cog-triton.json" not in manifest.files


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


KNOWN = Canary(input_ids=[5, 6], output_ids=[7, 8, 9])


class Answering:
    """Generator that answers with `ids`, or raises them."""

    def __init__(self, ids: list[int] | Exception) -> None:
        self._ids = ids
        self.asked: list[tuple[list[int], int]] = []

    async def greedy_ids(self, input_ids: Sequence[int], count: int) -> list[int]:
        self.asked.append((list(input_ids), count))
        if isinstance(self._ids, Exception):
            raise self._ids
        return self._ids


def check(directory: Path, generator: Answering, *, required: bool) -> None:
    family: Any = SimpleNamespace(directory=directory)
    asked: Any = generator
    asyncio.run(check_canary(family, asked, required=required))


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    (tmp_path / CANARY_NAME).write_text(KNOWN.to_json())
    return tmp_path


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "canary.json: the document: "),
        ('{"input_ids":[1],"output_ids":["a"]}', "canary.json: output_ids.0: 'a'"),
    ],
)
def test_a_broken_canary_is_refused_by_key_and_value(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / CANARY_NAME).write_text(text)
    with pytest.raises(EngineCorrupt) as caught:
        canary.load(tmp_path)
    assert named in str(caught.value)


def test_an_engine_without_canary_is_not_asked(tmp_path: Path) -> None:
    generator = Answering([])
    check(tmp_path, generator, required=True)
    assert generator.asked == []


def test_the_right_answer_passes_the_canary(engine: Path) -> None:
    generator = Answering([7, 8, 9])
    check(engine, generator, required=True)
    assert generator.asked == [([5, 6], 3)]


@pytest.mark.parametrize(
    ("answer", "code"), [([7, 8, 1], "E2112"), ([7, 8], "E2112"), (TritonTimeout("late"), "E2101")]
)
def test_another_answer_is_a_warning_unless_the_canary_is_required(
    engine: Path, answer: Any, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check(engine, Answering(answer), required=False)
    assert code in caplog.text
    with pytest.raises((CanaryFailed, TritonTimeout), match=code):
        check(engine, Answering(answer), required=True)


def test_an_engine_that_does_not_answer_gets_no_canary_and_a_warning(tmp_path: Path) -> None:
    lines: list[str] = []
    assert canary_of("openvino", tmp_path, lines.append) is None
    (line,) = lines
    assert line.startswith("[engine] warning: no canary")


ARGS = "lora_plugin: auto, lora_target_modules: [attn_q], max_lora_rank: 4"


def adapted(adapters: Any, args: str = ARGS, **changes: Any) -> BuildConfig:
    value = {
        "model_id": "org/base",
        "example_name": "llama",
        "convert": {"script": "convert_checkpoint.py", "output_dir": "checkpoint"},
        "lora_adapters": adapters,
        **changes,
    }
    build = f'"build": {{executable: trtllm-build, output_dir: engine, args: {{{args}}}}}'
    return parse_config(f"{json.dumps(value)[:-1]}, {build}}}", "c.yaml")


def prepared(
    wanted: BuildConfig, directory: Path, **shape: int
) -> tuple[list[packed_adapters.PackedAdapter], list[str]]:
    model, said = directory / "model", []
    model.mkdir(exist_ok=True)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, **shape}
    (model / "config.json").write_text(json.dumps(sizes))
    return packed_adapters.fetch(wanted, model, directory / "store", said.append), said


def test_an_adapter_of_the_hub_is_recorded_by_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = adapter(tmp_path / "a")
    with serving_hub({path.name: path.read_bytes() for path in source.iterdir()}) as hub:
        ask_hub(monkeypatch, hub.url, tmp_path)
        ((packed,), said) = prepared(adapted({"sql": ID}), tmp_path)
    assert packed.entry.source == ID
    assert packed.entry.revision is not None
    assert len(packed.entry.revision) == 40
    assert said[-1] == f"[lora] sql: rank 4 of q_proj, {packed.entry.revision}"


def test_an_adapter_is_packed_as_saved_and_as_tensorrt_llm_takes_it(tmp_path: Path) -> None:
    source = adapter(tmp_path / "a", 2, layers=2)
    ((packed,), _) = prepared(adapted({"sql": str(source)}), tmp_path)
    packed.write(tmp_path / "engine")
    place = tmp_path / "engine" / "lora" / "sql"
    names = ("adapter_config.json", "adapter_model.safetensors")
    assert sorted(path.name for path in place.iterdir()) == sorted((*names, *CONVERTED_FILES))
    expected = to_tensors(read_adapter(source))
    for name, tensor in zip(CONVERTED_FILES, ("lora_weights", "lora_config"), strict=True):
        found = np.load(place / name)
        assert found.dtype == expected[tensor].dtype
        assert np.array_equal(found, expected[tensor])


@pytest.mark.parametrize(
    ("made", "shape", "says"),
    [
        ({"rank": 8}, {}, "rank 8; the engine takes at most 4"),
        ({"modules": ["mlp.up_proj"]}, {}, "the engine takes adapters of q_proj only"),
        ({}, {"hidden_size": 32}, "takes 16 values; the base model's hidden size is 32"),
        ({"layers": 2}, {"num_hidden_layers": 1}, "the base model has 1 layers"),
        ({"use_dora": True}, {}, "use_dora=True: not supported"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_by_name(
    made: dict[str, Any], shape: dict[str, int], says: str, tmp_path: Path
) -> None:
    source = adapter(tmp_path / "a", **made)
    with pytest.raises(EngineIncompatible) as caught:
        prepared(adapted({"sql": str(source)}), tmp_path, **shape)
    assert caught.value.detail.startswith("lora_adapters.sql: ")
    assert says in caught.value.detail


def test_an_adapter_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"lora_adapters\.sql: './none': no such directory"):
        prepared(adapted({"sql": "./none"}), tmp_path)


def test_adapters_of_another_dtype_are_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    step = {"script": "c.py", "output_dir": "checkpoint", "args": {"dtype": "bfloat16"}}
    with pytest.raises(EngineIncompatible, match=r"convert\.args\.dtype: 'bfloat16': must be flo"):
        prepared(adapted({"sql": "./none"}, convert=step), tmp_path)


@pytest.mark.parametrize(
    ("adapters", "args", "where"),
    [
        ({"sql": "a"}, "lora_plugin: disable", "lora_adapters: build.args.lora_plugin"),
        ({"sql": "a"}, "lora_plugin: auto", "lora_adapters: build.args.lora_target_modules"),
        ({"sql": "a"}, "lora_plugin: auto, lora_target_modules: [q]", "'q'"),
        ({"a/b": "a"}, ARGS, "lora_adapters.a/b"),
        ({"..": "a"}, ARGS, "lora_adapters..."),
        ({"sql": {"source": "a", "revison": "b"}}, ARGS, "did you mean 'revision'"),
        ({"sql": {"source": "a", "sha256": "b"}}, ARGS, "lora_adapters.sql.sha256: 'b'"),
    ],
)
def test_adapters_that_cannot_be_are_refused(adapters: Any, args: str, where: str) -> None:
    with pytest.raises(BuildConfigInvalid) as caught:
        adapted(adapters, args)
    assert where in caught.value.detail


def test_no_secret_of_an_adapters_url_is_packed() -> None:
    text = adapted({"sql": "https://me:pass@host/a.tar?sig=secret"}).to_yaml()
    assert "https://host/a.tar" in text
    assert "pass" not in text
    assert "secret" not in text


def test_a_check_reads_adapters_that_are_here(tmp_path: Path) -> None:
    here = adapter(tmp_path / "a")
    wanted = adapted({"sql": str(here), "far": "org/far"})
    assert list(packed_adapters.look(wanted, None)) == [
        "sql: rank 4 of q_proj",
        "far: org/far: checked when it is fetched",
    ]
    adapter(tmp_path / "a", 16)
    with pytest.raises(CogTritonError, match=r"lora_adapters\.sql: .* rank 16"):
        list(packed_adapters.look(wanted, None))
