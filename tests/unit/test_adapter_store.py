"""Adapter store: what may be loaded, from where, and what engines then find."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hub_server import ID, ask_hub, serving_hub
from lora_adapters import adapter

from cog_triton.artifact.lora_adapter import LoRALimits
from cog_triton.engines.adapter_registry import AdapterRegistry
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


def test_special_files_do_not_block(make_store: MakeStore, tmp_path: Path) -> None:
    root = adapter(tmp_path / "adapters")
    (root / "adapter_config.json").unlink()
    os.mkfifo(root / "adapter_config.json")
    with pytest.raises(EngineCorrupt, match=r"adapter_config\.json: missing"):
        make_store(lora_dir=root).load_requested("sql", ".", replace=False)


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


def test_an_adapter_that_does_not_fit_is_refused_by_name(
    make_store: MakeStore, tmp_path: Path
) -> None:
    store = make_store()
    adapter(tmp_path / "a", 16)
    with pytest.raises(EngineIncompatible, match=r"lora_name='sql': .*/a: model.*rank 16"):
        store.fetch("sql", "a", tmp_path)
    assert names(store.registry) == []
    assert [path.name for path in store.registry.path.parent.iterdir()] == ["registry.json"]


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


@pytest.mark.parametrize("source", ["none", "./none", "ftp://host/a.tar", "https://[x"])
def test_sources_that_are_none_are_refused(
    source: str, make_store: MakeStore, tmp_path: Path
) -> None:
    with pytest.raises(ModelUnavailable, match="lora_name='sql'"):
        make_store().fetch("sql", source, tmp_path)


def test_the_registry_is_json_without_secrets(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store()
    store.load("sql", adapter(tmp_path / "a"))
    (row,) = json.loads(store.registry.path.read_text())
    del row["directory"]
    assert row == {"name": "sql", "number": 1, "rank": 4, "engine_name": "sql"}
