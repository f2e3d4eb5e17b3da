"""URLs of object stores: what is refused before a store is asked, and what an extra is for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cog_triton.download.url_download import fetch, local_path
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
    ],
)
def test_what_is_no_object_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="must be SCHEME://BUCKET/PATH") as caught:
        fetch(url, tmp_path / "x")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs"), ("az", "adlfs")])
def test_a_missing_extra_is_named(
    scheme: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        MissingExtra, match=rf"needs {package}: pip install 'cog-triton\[{scheme}\]'"
    ):
        fetch(f"{scheme}://bucket/model.tar", tmp_path / "x")


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "S3"])
def test_an_object_is_no_local_file(scheme: str) -> None:
    assert local_path(f"{scheme}://bucket/model.tar") is None
