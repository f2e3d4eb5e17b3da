"""From a model's name to what serves it, with a stand-in of the hub and without conversions."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import ID, MAIN, OLD, Hub, ask_hub, serving_hub
from openvino_reference import TinyModel

from cog_triton.builder.config import BuildConfig
from cog_triton.download import disk_space
from cog_triton.download.retry import RetryPolicy
from cog_triton.engines.vllm.model_directory import read_model
from cog_triton.errors import (
    CogTritonError,
    DiskFull,
    EngineIncompatible,
    InvalidArgument,
    MissingExtra,
    ModelUnavailable,
    TritonStartFailed,
)
from cog_triton.models import family_choice, preparation
from cog_triton.models.family_choice import VLLMInstallation
from cog_triton.models.preparation import (
    DEMO_MODEL,
    Conversion,
    Preparation,
    Prepared,
)
from cog_triton.settings import Settings
from cog_triton.sizing import gpu_table
from cog_triton.sources.source import Network, Source, Tar
from cog_triton.system.ports import free_ports

CONFIG = TinyModel.make("LlamaForCausalLM").config
WEIGHTS = random.Random(0).randbytes(300_000)
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": b'{"model": {}}',
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": WEIGHTS[:2000],
}
REGISTRY = """
_TEXT_GENERATION_MODELS = {"LlamaForCausalLM": ("llama", "LlamaForCausalLM")}
_EMBEDDING_MODELS = {"BertModel": ("bert", "BertEmbeddingModel")}
_PREVIOUSLY_SUPPORTED_MODELS = {"JAISLMHeadModel": "0.22.0"}
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving_hub(dict(FILES)) as running:
        yield running


@pytest.fixture(autouse=True)
def home(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    ask_hub(monkeypatch, hub.url, tmp_path)
    monkeypatch.setattr(family_choice, "visible_gpus", list)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def converted(monkeypatch: pytest.MonkeyPatch) -> list[BuildConfig]:
    """Build configs of the conversions that were run; each makes an empty engine directory."""
    runs: list[BuildConfig] = []

    def run(self: Conversion, store: Path, _echo: Any, max_positions: int) -> None:
        runs.append(self.config(max_positions))
        self.engine(store).mkdir(parents=True)

    monkeypatch.setattr(Conversion, "run", run)
    return runs


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VLLMInstallation:
    """A GPU and a vLLM, as far as is looked at them."""
    registry = tmp_path / "site" / "vllm" / "model_executor" / "models" / "registry.py"
    registry.parent.mkdir(parents=True)
    registry.write_text(REGISTRY)
    (tmp_path / "site" / "transformers" / "models" / "known_kind").mkdir(parents=True)
    found = VLLMInstallation(tmp_path / "site", tmp_path / "python")
    monkeypatch.setattr(family_choice, "visible_gpus", lambda: [90])
    monkeypatch.setattr(family_choice, "find_vllm", lambda _work_dir: found)
    return found


def named(text: str) -> Source:
    return Source.open(text, Network(retry=RetryPolicy(2, 2, 0.001)))


def prepare(home: Path, text: str, **options: Any) -> tuple[Prepared, list[str]]:
    lines: list[str] = []
    settings = Settings(cog_triton_work_dir=home / "work")
    return Preparation(settings, lines.append, **options).prepare(named(text)), lines


def refusal(home: Path, hub: Hub, text: str, kind: type[CogTritonError], **options: Any) -> str:
    """The refusal, before a byte of the weights was asked for."""
    with pytest.raises(kind) as caught:
        prepare(home, text, **options)
    assert not [path for path in hub.requests if "safetensors" in path or ".bin" in path]
    return caught.value.detail


def with_config(hub: Hub, **changes: Any) -> None:
    hub.files[MAIN]["config.json"] = json.dumps({**CONFIG, **changes}).encode()


def test_a_model_of_the_hub_is_converted_once(
    home: Path, hub: Hub, converted: list[BuildConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, lines = prepare(home, ID)
    assert lines[0] == (
        f"{ID}@{MAIN}: served by openvino, as this machine has no GPU;"
        " for vllm: a GPU, and cog-triton setup vllm"
    )
    assert f"{ID}: 300 kB to download into {home}/hub; 180 kB for the conversion" in lines[1]
    assert first.served_model_name == ID
    assert first.vllm_python is None
    (config,) = converted
    assert (config.revision, config.weight_format) == (MAIN, "safetensors")
    assert config.build.args["max_seq_len"] == 512
    ask_hub(monkeypatch, f"http://127.0.0.1:{free_ports(1)[0]}")  # of another hub nothing is known
    with pytest.raises(ModelUnavailable):
        prepare(home, ID)
    ask_hub(monkeypatch, hub.url)
    hub.requests.clear()
    assert prepare(home, ID)[0] == first
    assert hub.requests == []
    assert len(converted) == 1


def test_a_revision_is_pinned_until_an_update(
    home: Path, hub: Hub, converted: list[BuildConfig]
) -> None:
    prepare(home, ID)
    prepare(home, f"{ID}@v1")
    assert [done.revision for done in converted] == [MAIN, OLD]
    hub.revisions["main"] = OLD
    prepare(home, f"{ID}@main")
    assert [done.revision for done in converted] == [MAIN, OLD]
    assert OLD in prepare(home, ID, update=True)[1][0]
    assert OLD in prepare(home, ID)[1][0]
    assert len(converted) == 2


LACKS = {"model.safetensors": None}


@pytest.mark.parametrize(
    ("on_gpu", "config", "files", "told"),
    [
        (
            False,
            {"architectures": ["GPT2LMHeadModel"]},
            {},
            "architectures ['GPT2LMHeadModel']: the openvino family builds LlamaForCausalLM,",
        ),
        (False, {"num_local_experts": 8}, {}, "num_local_experts 8: mixture-of-experts is not sup"),
        (False, {"num_local_experts": 8}, {}, "; vLLM may take it, on a GPU: cog-triton setup vl"),
        (True, {"architectures": ["BertModel"]}, {}, "vLLM has it in EMBEDDING_MODELS only"),
        (True, {"architectures": ["JAISLMHeadModel"]}, {}, "PREVIOUSLY_SUPPORTED_MODELS only"),
        (True, {"architectures": ["LamaForCausalLM"]}, {}, "did you mean 'LlamaForCausalLM'?"),
        (True, {"architectures": None}, {}, "architectures none"),
        (False, {}, LACKS, "it holds config.json, pytorch_model.bin, tokenizer.json"),
        (False, {}, {**LACKS, "a.gguf": WEIGHTS}, "download a .gguf file, and name it"),
        (False, {}, {"config.json": b"[]"}, "config.json: must hold an object"),
        (False, {}, {"config.json": None}, "has no config.json"),
    ],
)
def test_a_model_is_refused_before_its_download(
    on_gpu: bool,
    config: dict[str, Any],
    files: dict[str, Any],
    told: str,
    home: Path,
    hub: Hub,
    request: pytest.FixtureRequest,
) -> None:
    if on_gpu:
        request.getfixturevalue("vllm")
    with_config(hub, **config)
    for name, content in files.items():
        hub.files[MAIN].pop(name, None)
        hub.files[MAIN] |= {} if content is None else {name: content}
    refused = refusal(home, hub, ID, CogTritonError)
    assert told in refused
    assert refused.startswith(ID)


def test_what_does_not_fit_the_disk_is_refused_before_the_download(
    home: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_space, "_free", lambda _directory: disk_space.RESERVE + 400_000)
    told = refusal(home, hub, ID, DiskFull)
    assert "download and conversion: needs 480 kB more" in told
    assert "HF_HOME may name another disk" in told


def test_a_directory_and_its_change(home: Path, converted: list[BuildConfig]) -> None:
    model = TinyModel.make("Qwen3ForCausalLM").save(home / "mine")
    first, _ = prepare(home, "mine")
    assert first.served_model_name == "mine"
    assert prepare(home, str(model))[0] == first
    (done,) = converted
    assert (done.model_id, done.revision) == (str(model), None)
    assert done.build.args["max_seq_len"] == 512
    (model / "tokenizer_config.json").write_text("{}")
    assert prepare(home, "mine")[0] != first


def test_a_gpu_with_vllm_gets_a_directory_for_it(
    home: Path, hub: Hub, vllm: VLLMInstallation, converted: list[BuildConfig]
) -> None:
    found, lines = prepare(home, ID)
    assert "served by vllm, as this machine has a GPU and vLLM; for the CPU:" in lines[0]
    assert (found.served_model_name, found.vllm_python) == (ID, vllm.python)
    model = read_model(Path(found.weights))
    assert (model.max_model_len, (Path(model.arguments["model"]) / "config.json").is_file()) == (
        512,
        True,
    )
    assert not (Path(model.arguments["model"]) / "pytorch_model.bin").exists()
    assert prepare(home, ID)[0] == found
    assert converted == []
    prepare(home, ID, family="openvino")
    assert len(converted) == 1


def test_a_model_too_large_for_the_gpu_is_refused_before_the_download(
    home: Path, hub: Hub, vllm: VLLMInstallation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_table, "gpus_here", lambda: [gpu_table.Gpu("G", 90, 1000)])
    assert "weights on each" in refusal(home, hub, ID, EngineIncompatible)
    monkeypatch.setattr(gpu_table, "gpus_here", lambda: [gpu_table.Gpu("G", 90, 1 << 30, 0)])
    with_config(hub, architectures=["NewForCausalLM"], model_type="known-kind")  # Transformers'
    assert prepare(home, ID)[0].vllm_python == vllm.python  # an engine of ours may hold it


def test_a_forced_family(
    home: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, converted: list[BuildConfig]
) -> None:
    assert "no NVIDIA GPU" in refusal(home, hub, ID, EngineIncompatible, family="vllm")
    assert "run cog-triton build" in refusal(home, hub, ID, InvalidArgument, family="tensorrt_llm")
    assert "must be one of" in refusal(home, hub, ID, InvalidArgument, family="tgi")
    monkeypatch.setattr(family_choice, "visible_gpus", lambda: [90])
    told = refusal(home, hub, ID, MissingExtra, family="vllm")
    assert told == "--family vllm: vLLM is not set up here: run cog-triton setup vllm"
    assert "which only openvino" in refusal(home, hub, DEMO_MODEL, InvalidArgument, family="vllm")
    _, lines = prepare(home, ID)
    assert "as vLLM is not set up here; for the GPU: cog-triton setup vllm" in lines[0]
    (home / "engine").mkdir()
    (home / "engine" / "model.json").write_text("{}")
    told = refusal(home, hub, "engine", InvalidArgument, family="openvino")
    assert told.endswith("engine is an engine, it is vllm's: leave --family out")
    assert prepare(home, "engine", family="vllm")[0] == Prepared("engine")


def test_an_engine_is_served_as_it_is(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepare(home, "http://127.0.0.1:9/engine.tar")[0].weights.startswith("http:")
    (home / "engine.tar").write_bytes(b"")
    with pytest.raises(CogTritonError, match="E1306"):
        prepare(home, "engine.tar")
    monkeypatch.setattr(Tar, "family", lambda _self: "openvino")
    assert prepare(home, "engine.tar")[0] == Prepared("engine.tar")


def test_a_python_without_libpython_is_refused_before_a_download(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(cog_triton_work_dir=home / "work")
    monkeypatch.setattr(preparation, "machine_binary", lambda: None)
    preparation.require_libpython(settings)
    monkeypatch.setattr(preparation, "missing_libpython", lambda: "libpython3.11.so.1.0")
    with pytest.raises(TritonStartFailed, match=r"apt-get install libpython3\.11, or use a Python"):
        preparation.require_libpython(settings)
    other = settings.model_copy(update={"tritonserver": home / "tritonserver"})
    preparation.require_libpython(other)
