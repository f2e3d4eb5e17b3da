"""LoRA adapters: the store, the tensors of TensorRT-LLM, and when its engine loads them."""

from __future__ import annotations

import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import tensorrt_llm_engines
from hub_server import ID, ask_hub, serving_hub
from loop_thread import OnLoop
from lora_adapters import adapter
from safetensors.numpy import load_file, save_file
from scripted_server import PATIENCE_S
from scripted_triton import Request, ScriptedTriton, event

from cog_triton.artifact.lora_adapter import LoRALimits, read_adapter
from cog_triton.engines.adapter_registry import REGISTRY, AdapterRegistry, RegisteredAdapter
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import StepItem
from cog_triton.engines.tensorrt_llm.adapter_tensors import to_tensors
from cog_triton.errors import (
    EngineCorrupt,
    EngineIncompatible,
    InvalidArgument,
    ModelUnavailable,
    NotFound,
    Overloaded,
)
from cog_triton.serving import adapter_store
from cog_triton.serving.adapter_store import AdapterStore
from cog_triton.settings import load_settings
from cog_triton.text.sampling import SamplingParams
from cog_triton.triton import model_repository
from cog_triton.triton.request_streams import RequestStreams
from cog_triton.triton.serve_config import ServeConfig

MakeStore = Callable[..., AdapterStore]


@pytest.fixture
def make_store(tmp_path: Path) -> MakeStore:
    def make(**settings: Any) -> AdapterStore:
        run_dir = tmp_path / "run"
        run_dir.mkdir(exist_ok=True)
        loaded = load_settings(cog_triton_work_dir=tmp_path / "work", **settings)
        return AdapterStore(loaded, LoRALimits(max_rank=8, max_loras=2), run_dir)

    return make


def names(registry: AdapterRegistry) -> list[str]:
    """What another process reads."""
    return list(AdapterRegistry(registry.path).adapters())


def test_engines_get_copies_of_two_files(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store()
    source = adapter(tmp_path / "a")
    (source / "adapter_model.bin").write_bytes(b"pickle")
    store.fetch("sql", "a", tmp_path)
    reader = AdapterRegistry(store.registry.path)
    found = reader.find("sql")
    assert (found.number, found.rank, found.engine_name) == (1, 4, "sql")
    assert sorted(path.name for path in found.directory.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert not found.directory.is_relative_to(source)
    with pytest.raises(InvalidArgument, match="lora_name='sqll': no such adapter; did you mean"):
        reader.find("sqll")


def test_a_reader_sees_what_is_loaded_and_unloaded(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store()
    reader = AdapterRegistry(store.registry.path)
    assert reader.adapters() == {}
    store.load("one", adapter(tmp_path / "one"))
    store.load("two", adapter(tmp_path / "two", 8))
    assert [each.number for each in reader.adapters().values()] == [1, 2]
    store.unload("one")
    assert list(reader.adapters()) == ["two"]
    with pytest.raises(NotFound, match="lora_name='twoo': no such adapter; did you mean 'two'"):
        store.unload("twoo")


def test_what_replaces_an_adapter_has_another_name_in_the_engine(
    make_store: MakeStore, tmp_path: Path
) -> None:
    """Else the engine would go on from keys and values of the one before."""
    store = make_store()
    store.load("sql", adapter(tmp_path / "one"))
    before = store.registry.find("sql")
    with pytest.raises(InvalidArgument, match="lora_name='sql': is loaded"):
        store.load("sql", adapter(tmp_path / "two", seed=1))
    store.load("sql", tmp_path / "two", replace=True)
    after = store.registry.find("sql")
    assert (after.number, after.engine_name) == (2, "sql#2")
    assert after.directory != before.directory
    assert before.directory.is_dir(), "requests that run may need it"
    store.restore(before, "sql")
    assert store.registry.find("sql") == before
    store.unload("sql")
    store.load("sql", tmp_path / "one")
    assert store.registry.find("sql").engine_name == "sql#3"
    assert store.registry.find("sql").directory == before.directory, "the same content once"


def test_a_server_that_follows_another_has_its_adapters_and_numbers_of_its_own(
    make_store: MakeStore, tmp_path: Path
) -> None:
    store = make_store()
    kept = store.load("sql", adapter(tmp_path / "one"))
    store.load("gone", adapter(tmp_path / "two"))
    store.unload("gone")
    again = make_store()
    again.fetch("sql", "nowhere", tmp_path)
    assert again.adapters() == {"sql": kept}
    found = again.load("gone", adapter(tmp_path / "three", 8))
    assert found.number > 2, "the engine may have the other one by that"
    assert found.engine_name == f"gone#{found.number}"


@pytest.mark.parametrize(
    ("path", "refused"),
    [
        ("a", None),
        ("x/../a", None),
        ("inner", None),
        ("../outside", "no such directory below LORA_DIR"),
        ("link", "no such directory below LORA_DIR"),
        ("/etc", "no such directory below LORA_DIR"),
        ("none", "no such directory below LORA_DIR"),
        ("a\0", "no such directory below LORA_DIR"),
        ("a" * 5000, "no such directory below LORA_DIR"),
        ("linked-file", r"lora_path: adapter_\S+ is a link that leads out of LORA_DIR"),
        (".", "missing"),
    ],
)
def test_nothing_leads_out_of_the_directory(
    path: str, refused: str | None, make_store: MakeStore, tmp_path: Path
) -> None:
    root = tmp_path / "adapters"
    adapter(root / "a")
    (root / "x").mkdir()
    outside = adapter(tmp_path / "outside")
    (root / "link").symlink_to(outside)
    (root / "inner").symlink_to("a")
    (root / "linked-file").mkdir()
    for file in outside.iterdir():
        (root / "linked-file" / file.name).symlink_to(file)
    store = make_store(lora_dir=root)
    if refused is None:
        store.load_requested("sql", path, replace=False)
        assert names(store.registry) == ["sql"]
        absolute = store.load_requested("abs", str(root / "a"), replace=False)
        assert absolute.directory.is_dir(), "an absolute path below it is one, too"
        return
    with pytest.raises((InvalidArgument, EngineCorrupt), match=refused):
        store.load_requested("sql", path, replace=False)
    assert names(store.registry) == []


@pytest.mark.parametrize("name", ["", "a b", "../a", "a#2", "-a", "x" * 129, "é"])
def test_names_are_plain(name: str, make_store: MakeStore, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="must begin with a letter or a digit"):
        make_store().load(name, adapter(tmp_path / "a"))


def test_size_and_number_are_bounded(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = adapter(tmp_path / "a", 1), adapter(tmp_path / "b", 8, hidden=64)
    store = make_store(max_lora_bytes=3000)
    monkeypatch.setattr(adapter_store, "_MOST_LOADED", 1)
    with pytest.raises(ModelUnavailable, match=r"at most 3000 are taken \(MAX_LORA_BYTES\)"):
        store.load("large", large)
    store.load("small", small)
    with pytest.raises(Overloaded, match="1 LoRA adapters are loaded"):
        store.load("another", small)
    store.load("small", small, replace=True)


def test_tars_are_fetched_by_url(make_store: MakeStore, tmp_path: Path) -> None:
    adapter(tmp_path / "one" / "inner")
    tar = tmp_path / "one.tar"
    with tarfile.open(tar, "w") as archive:
        archive.add(tmp_path / "one" / "inner", "inner")
    store = make_store()
    store.fetch("sql", tar.as_uri(), tmp_path)
    assert store.registry.find("sql").rank == 4
    with tarfile.open(tar, "a") as archive:
        archive.add(tmp_path / "one" / "inner", "second")
    with pytest.raises(ModelUnavailable, match=r"holds 2 adapter_config\.json"):
        store.fetch("two", tar.as_uri(), tmp_path)


def test_two_files_are_fetched_from_the_hub(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = adapter(tmp_path / "a")
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    with serving_hub({**files, "adapter_model.bin": b"pickle", "README.md": b"x"}) as hub:
        ask_hub(monkeypatch, hub.url, tmp_path)
        store = make_store()
        store.fetch("sql", ID, tmp_path)
        asked = [request for request in hub.requests if "/resolve/" in request]
        assert not any(request.endswith((".bin", ".md")) for request in asked), asked
        assert store.registry.find("sql").rank == 4
        store._settings = load_settings(max_lora_bytes=10, cog_triton_work_dir=tmp_path / "w2")
        with pytest.raises(ModelUnavailable, match="lora_name='large'"):
            store.fetch("large", ID, tmp_path)


LORA = {
    "pretrained_config__dtype": "float16",
    "pretrained_config__hidden_size": 16,
    "pretrained_config__num_hidden_layers": 2,
    "build_config__plugin_config__lora_plugin": "float16",
    "build_config__lora_config": {
        "lora_dir": [],
        "max_lora_rank": 8,
        "lora_target_modules": ["attn_q", "mlp_4h_to_h"],
    },
}


def test_a_row_is_both_matrices_of_a_module_the_second_scaled(tmp_path: Path) -> None:
    modules = ("self_attn.v_proj", "mlp.down_proj")
    directory = adapter(tmp_path / "a", 4, modules=modules, layers=2, sizes={modules[1]: (16, 48)})
    tensors = to_tensors(read_adapter(directory))
    weights, config = tensors["lora_weights"], tensors["lora_config"]
    longest = 4 * 48 + 16 * 4
    assert (weights.dtype, weights.shape) == (np.float16, (1, 4, longest))
    assert (config.dtype, config.shape) == (np.int32, (1, 4, 3))
    rows = {(module, layer): place for place, (module, layer, _) in enumerate(config[0].tolist())}
    assert set(rows) == {(3, 0), (3, 1), (6, 0), (6, 1)}, "attn_v and mlp_4h_to_h"
    assert {row[2] for row in config[0].tolist()} == {4}
    stored = load_file(directory / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_"
    row = weights[0, rows[3, 1]]
    assert np.array_equal(row[:64], stored[f"{name}A.weight"].ravel().astype(np.float16))
    up = 2 * stored[f"{name}B.weight"].ravel()  # alpha 8 over rank 4
    assert np.array_equal(row[64:128], up.astype(np.float16))
    assert not row[128:].any()


def test_what_tensorrt_llm_cannot_take_is_refused(tmp_path: Path) -> None:
    unknown = read_adapter(adapter(tmp_path / "a", modules=["mlp.odd_proj"]))
    with pytest.raises(EngineIncompatible, match="odd_proj: TensorRT-LLM adapts"):
        to_tensors(unknown)
    directory = adapter(tmp_path / "b")
    path = directory / "adapter_model.safetensors"
    save_file({name: tensor * 1e6 for name, tensor in load_file(path).items()}, path)
    with pytest.raises(EngineIncompatible, match="values that FP16 does not hold"):
        to_tensors(read_adapter(directory))


def test_limits_are_those_that_the_engine_was_built_for(tmp_path: Path) -> None:
    family = tensorrt_llm_engines.family(tmp_path / "engine", **LORA)
    assert family.lora_limits() == LoRALimits(
        max_rank=8,
        max_loras=family.limits.max_batch_size,
        modules=frozenset({"q_proj", "down_proj"}),
        hidden_size=16,
        layers=2,
    )
    plain = tensorrt_llm_engines.family(tmp_path / "plain")
    with pytest.raises(EngineIncompatible, match="build it with lora_plugin"):
        plain.lora_limits()
    other = {**LORA, "pretrained_config__dtype": "bfloat16"}
    with pytest.raises(EngineIncompatible, match=r"dtype=bfloat16: .*build with dtype float16"):
        tensorrt_llm_engines.family(tmp_path / "bf16", **other).lora_limits()


def test_requests_carry_the_task_and_never_the_name(tmp_path: Path) -> None:
    family = tensorrt_llm_engines.family(tmp_path / "engine", **LORA)
    family.registry = AdapterRegistry(tmp_path / "registry.json")
    family.registry.write([RegisteredAdapter("sql", 7, tmp_path, 4, "sql")])
    request = EngineRequest(input_ids=[1], sampling=SamplingParams(max_tokens=1), adapter="sql")
    values = family.encode_request(request)
    assert values["lora_task_id"] == (1 << 32) + 7
    assert "lora_name" not in values
    target = tmp_path / "repository"
    model_repository.render_repository(family, ServeConfig(), target)
    loader = model_repository.read_config(target / "lora_loader" / "config.pbtxt")
    assert loader.parameters[REGISTRY].string_value == str(family.registry.path)
    engine = model_repository.read_config(target / "tensorrt_llm" / "config.pbtxt")
    assert REGISTRY not in engine.parameters
    assert "lora_name" not in {tensor.name for tensor in engine.input}


MISSING = "E1005 InvalidArgument: lora_task_id=7: not loaded: send lora_weights"
REQUEST = EngineRequest(input_ids=[1], sampling=SamplingParams(max_tokens=2), adapter="sql")


class Engine:
    """Answers as Triton does: a request of an adapter fails until that was loaded."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.prompts: list[list[int]] = []
        self.loaded = False
        self.error: str | None = None
        self.loading = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, request: Request) -> Iterator[Any]:
        if request.model == "lora_loader":
            self.loading.set()
            self.gate.wait(PATIENCE_S)
            self.loads.append(request.values["lora_name"])
            if self.error is not None:
                yield event(error=self.error)
                return
            self.loaded = True
            yield event(lora_task_id=7)
            return
        self.prompts.append(request.values["input_ids"])
        if request.values.get("lora_name") and not self.loaded:
            yield event(error=MISSING)
        else:
            yield from (event(output_ids=[5]), event(output_ids=[6]))


def until_end(inbox: Queue[StepItem]) -> list[StepItem]:
    items = [inbox.get(timeout=PATIENCE_S)]
    while not items[-1].end:
        items.append(inbox.get(timeout=PATIENCE_S))
    return items


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def streams(engine: Engine) -> Iterator[RequestStreams]:
    with ScriptedTriton(engine) as triton, triton.connected() as made:
        yield OnLoop(made)  # type: ignore[misc]


def test_requests_that_come_together_load_it_once(engine: Engine, streams: RequestStreams) -> None:
    engine.gate.clear()
    inboxes: list[Queue[StepItem]] = [Queue() for _ in range(8)]
    for inbox in inboxes:
        streams.submit(REQUEST, {}, inbox.put)
    engine.gate.set()
    for inbox in inboxes:
        items = until_end(inbox)
        assert [token for item in items for token in item.ids] == [5, 6], items
    assert engine.loads == ["sql"]
