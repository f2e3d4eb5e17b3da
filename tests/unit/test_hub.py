"""Models from a stand-in of the hub, through the real huggingface_hub."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import ID, MAIN, OLD, Hub, ask_hub, serving_hub
from huggingface_hub import constants
from range_server import Content, Fault, FileServer
from sample_engines import contents

from cog_triton.download import model_source, partial_file
from cog_triton.download.hub_cache import choose
from cog_triton.download.model_request import FetchedModel, ModelRequest
from cog_triton.download.retry import RetryPolicy
from cog_triton.errors import ModelUnavailable
from cog_triton.system.ports import free_ports

FAST = RetryPolicy(max_failures=4, initial_s=0.001, max_s=0.01)
TOKEN = "hf_hunter2hunter2"
WEIGHTS = random.Random(0).randbytes(300_000)
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "merges.txt": b"a b",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"# Tiny",
    "modeling.py": b"raise SystemExit",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": WEIGHTS[:2000],
    "original/consolidated.00.pth": WEIGHTS[:3000],
}
NEEDED = ["chat_template.jinja", "config.json", "merges.txt", "model.safetensors", "tokenizer.json"]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving_hub(FILES) as running:
        yield running


@pytest.fixture(autouse=True)
def home(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    ask_hub(monkeypatch, hub.url, tmp_path)
    monkeypatch.setattr(partial_file, "PIECE", 64 << 10)
    return tmp_path


def get(home: Path, request: ModelRequest) -> tuple[FetchedModel, list[str]]:
    """The model, and what was told meanwhile."""
    lines: list[str] = []
    model = model_source.fetch_model(request, home / "store", lines.append, retry=FAST)
    assert "hunter2" not in "".join(lines)
    return model, lines


def refused(home: Path, request: ModelRequest) -> str:
    lines: list[str] = []
    with pytest.raises(ModelUnavailable) as caught:
        model_source.fetch_model(request, home / "store", lines.append, retry=FAST)
    said = str(caught.value)
    assert "hunter2" not in said + "".join(lines)
    return said


def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_hub(monkeypatch, f"http://127.0.0.1:{free_ports(1)[0]}")


def test_weights_and_config_files_are_fetched(hub: Hub, home: Path) -> None:
    model, lines = get(home, ModelRequest(ID))
    assert model.revision == MAIN
    assert contents(model.path) == {name: FILES[name] for name in NEEDED}
    assert any(line.startswith(f"[download] {ID} 300 kB in") for line in lines)
    asked = [request for request in hub.requests if "/resolve/" in request]
    assert asked
    assert all(f"/resolve/{MAIN}/" in request for request in asked)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"weight_format": "bin"}, [*NEEDED[:3], "pytorch_model.bin", "tokenizer.json"]),
        ({"files": ("*.md", "model*")}, ["README.md", "model.safetensors", "modeling.py"]),
        ({"files": ("original/*",)}, ["original/consolidated.00.pth"]),
    ],
)
def test_file_patterns_and_weight_format_select_files(
    home: Path, choice: dict[str, Any], names: list[str]
) -> None:
    get(home, ModelRequest(ID))  # what else is in the cache must not show
    assert list(contents(get(home, ModelRequest(ID, **choice))[0].path)) == names


def test_a_cached_commit_needs_no_network(
    hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = get(home, ModelRequest(ID, revision=MAIN))
    asked = len(hub.requests)
    unreachable(monkeypatch)
    assert get(home, ModelRequest(ID, revision=MAIN)) == (first, [])
    assert model_source.locate(ModelRequest(ID, revision=MAIN), home / "store") == first
    assert model_source.size(ModelRequest(ID, revision=MAIN), home / "store") == 0
    assert len(hub.requests) == asked


def test_an_unreachable_hub_falls_back_to_the_cached_branch(
    hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = get(home, ModelRequest(ID))
    hub.status = 503
    again, lines = get(home, ModelRequest(ID))
    assert again == first
    assert lines == [f"[download] {ID}: {hub.url} answers HTTP 503; taking what is here, {MAIN}"]
    unreachable(monkeypatch)
    again, lines = get(home, ModelRequest(ID))
    assert again == first
    assert "unreachable" in lines[0]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert get(home, ModelRequest(ID))[0] == first
    assert "HF_HUB_OFFLINE is set" in refused(home, ModelRequest(ID, revision="v1"))


def test_a_moved_branch_is_fetched(hub: Hub, home: Path) -> None:
    first, _ = get(home, ModelRequest(ID))
    hub.revisions["main"] = OLD
    second, _ = get(home, ModelRequest(ID))
    assert second.revision == OLD
    assert first.path != second.path
    assert len(hub.cdn) == 1  # the weights are the same


def test_a_cache_filled_by_the_library_is_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    get(home, ModelRequest(ID))
    unreachable(monkeypatch)
    model = model_source.fetch_model(ModelRequest(ID), home / "another", lambda _: None, retry=FAST)
    assert contents(model.path) == {name: FILES[name] for name in NEEDED}


def test_large_files_are_retried_and_resumed(hub: Hub, home: Path) -> None:
    faults = {1: Fault(reset_after=1000), 2: Fault(status=503), 4: Fault(close_after=10)}
    hub.plan = lambda number, _: Fault(status=500) if number > 5 else faults.get(number)
    assert "HTTP 500" in refused(home, ModelRequest(ID))
    assert model_source.locate(ModelRequest(ID), home / "store") is None
    server = hub.cdn[0]
    server.plan, server.requests = (lambda *_: None), []
    assert contents(get(home, ModelRequest(ID))[0].path)["model.safetensors"] == WEIGHTS
    assert 0 < len(server.requests) < 6


def test_a_large_file_with_a_wrong_checksum_is_refused(hub: Hub, home: Path) -> None:
    wrong = FileServer(Content.of(bytes(len(WEIGHTS))))
    wrong.url = hashlib.sha256(WEIGHTS).hexdigest()
    hub.cdn.append(wrong)
    assert "has sha256" in refused(home, ModelRequest(ID))
    assert wrong.requests


PUBLIC, PRIVATE, GATED = {}, {"token": TOKEN}, {"token": TOKEN, "gated": True}


@pytest.mark.parametrize(
    ("hub_is", "asked", "says"),
    [
        (PUBLIC, {"model_id": "org/none"}, "{url} has no model org/none, or it is private"),
        (PUBLIC, {"revision": "v9"}, "{id} has no revision 'v9'"),
        (PUBLIC, {"revision": "../../x"}, "{id} has no revision '../../x'"),
        (PUBLIC, {"files": ("*.gguf",)}, "{id}: no file matches *.gguf; there is README.md"),
        (PRIVATE, {}, "or it is private: give hf_token"),
        (PRIVATE, {"token": "hf_hunter2"}, "the token may not read it"),
        (GATED, {}, "{id} is gated: accept its licence at {url}/{id} with your account, and"),
        (GATED, {"token": TOKEN + "x"}, "{id} is gated: accept its licence"),
        (GATED, {"token": TOKEN + "x"}, "with the token's account"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(
    hub_is: dict[str, Any], asked: dict[str, Any], says: str, hub: Hub, home: Path
) -> None:
    vars(hub).update(hub_is)
    said = refused(home, ModelRequest(**{"model_id": ID, **asked}))
    assert says.format(url=hub.url, id=ID) in said


@pytest.mark.parametrize("hub_is", [PRIVATE, GATED])
def test_a_token_opens_a_model(
    hub_is: dict[str, Any], hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vars(hub).update(hub_is)
    request = ModelRequest(ID, token=TOKEN)
    assert contents(get(home, request)[0].path)["model.safetensors"] == WEIGHTS
    monkeypatch.setenv("HF_TOKEN", TOKEN)  # as the library does by itself
    get(home, ModelRequest(ID, files=("*.md",)))


def test_tokens_are_redacted_everywhere(
    hub: Hub, home: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    hub.token = TOKEN
    request = ModelRequest(ID, token=TOKEN)
    get(home, request)
    hub.status = 403
    refused(home, ModelRequest("org/none", token=TOKEN))
    captured = capfd.readouterr()
    assert TOKEN not in repr(request) + captured.out + captured.err + caplog.text
    files = [path for path in home.rglob("*") if path.is_file()]
    assert len(files) > 8
    assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []
    assert set(hub.cdn_tokens) == {None}


SHARDED = [
    ".gitattributes",
    "LICENSE.txt",
    "README.md",
    "config.json",
    "consolidated.safetensors",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "onnx/config.json",
    "optimizer.bin",
    "original/consolidated.00.pth",
    "pytorch_model-00001-of-00001.bin",
    "pytorch_model.bin.index.json",
    "tokenization.py",
    "tokenizer.json",
    "tokenizer.model",
    "training_args.bin",
]
BESIDE = ["LICENSE.txt", "config.json"]
TOKENIZER = ["tokenizer.json", "tokenizer.model"]


def test_weights_are_selected_in_one_format() -> None:
    assert choose(SHARDED, None, None, "x") == [
        *BESIDE,
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        *TOKENIZER,
    ]
    assert choose(SHARDED, None, "bin", "x") == [
        *BESIDE,
        "pytorch_model-00001-of-00001.bin",
        "pytorch_model.bin.index.json",
        *TOKENIZER,
    ]
