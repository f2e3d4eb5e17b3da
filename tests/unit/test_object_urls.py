"""URLs that are not asked by HTTP: objects of stores, files of this machine, and mistakes."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from cog_triton.download.url_download import fetch, size
from cog_triton.errors import MissingExtra, ModelUnavailable


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3://bucket",
        "s3://bucket/",
        "s3:///key",
        "s3://KEY:hunter2@bucket/model.tar",
        "gs://bucket/model.tar?token=hunter2",
        "az://bucket/model.tar#hunter2",
        "s3://bucket/a\nb",
        "s3://bucket/a/../b",
    ],
)
def test_what_is_no_object_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="must be SCHEME://BUCKET/PATH") as caught:
        fetch(url, tmp_path / "x")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "S3"])
def test_a_missing_extra_is_named(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingExtra, match=r"needs obstore: pip install 'cog-triton\[buckets\]'"):
        fetch(f"{scheme}://bucket/model.tar", tmp_path / "x")


@pytest.mark.parametrize(
    "url",
    ["ftp://h/m", "http://[::1/", "file://other/m", "http:///m", "http://user:hun#ter2@host/m"],
)
def test_an_invalid_url_is_refused_and_its_password_hidden(url: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable) as caught:
        fetch(url, tmp_path / "x", echo=lambda _: None)
    assert "hun" not in str(caught.value)


def test_local_files_are_not_copied(tmp_path: Path) -> None:
    target = tmp_path / "model.tar"
    here = tmp_path / "größe 1.tar"
    here.write_bytes(b"content")
    total = hashlib.sha256(b"content").hexdigest()
    for address in (str(here), here.as_uri()):
        assert fetch(address, target, sha256=total, echo=lambda _: None) == here
        assert size(address) == 7
        with pytest.raises(ModelUnavailable, match="has sha256"):
            fetch(address, target, sha256="0" * 64, echo=lambda _: None)
    with pytest.raises(ModelUnavailable, match="no such file"):
        fetch(str(tmp_path / "none"), target, echo=lambda _: None)
    assert not target.exists()
