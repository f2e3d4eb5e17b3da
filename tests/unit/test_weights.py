"""Engine weights: real tars over a real HTTP server, each fetched and unpacked once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from sample_engines import original_tar, pack
from scripted_server import RESET, Part, Request, serving, whole
from test_engine_tar import engine

from cog_triton.artifact import engine_manifest
from cog_triton.download.retry import RetryPolicy
from cog_triton.errors import EngineCorrupt, ModelUnavailable
from cog_triton.serving import engine_preparation
from cog_triton.serving.engine_preparation import engine_directory
from cog_triton.settings import Settings, load_settings

FAST = RetryPolicy(max_failures=3, initial_s=0.001)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(cog_triton_work_dir=tmp_path / "work", engine_dir=tmp_path / "served")


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    engine(tmp_path / "engine")
    return pack(tmp_path / "engine", tmp_path / "engine.tar")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_preparation, "_RETRY", FAST)


def fetch(settings: Settings, weights: str | None) -> Path:
    return engine_directory(settings, weights)


Answer = Sequence[Part] | Callable[[Request], Sequence[Part]]


def download(
    settings: Settings, answer: Answer, path: str = "/engine.tar", times: int = 1
) -> tuple[Path, list[Request]]:
    """The directory of the last of `times` fetches, and the requests they made."""

    async def main() -> tuple[Path, list[Request]]:
        async with serving(answer) as server:
            for _ in range(times):
                url = server.url + path
                directory = await asyncio.to_thread(fetch, settings, url)
            return directory, server.requests

    return asyncio.run(main())


def files(directory: Path) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in engine_manifest.files_of(directory).items()}


def leftovers(settings: Settings) -> list[str]:
    return [path.name for path in settings.work_dir.rglob("*") if "partial" in path.name]


@pytest.mark.parametrize("form", ["{}", "FILE://localhost{}"])
def test_a_tar_is_unpacked(form: str, tar: Path, settings: Settings, tmp_path: Path) -> None:
    directory = fetch(settings, form.format(tar))
    assert directory.is_relative_to(settings.work_dir)
    assert files(directory) == files(tmp_path / "engine")


def test_relative_path_with_a_colon_is_a_file(
    tar: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    tar.rename(tar.with_name("engine:v1.tar"))
    monkeypatch.chdir(tar.parent)
    assert fetch(settings, "engine:v1.tar").is_dir()


def test_a_tar_is_unpacked_once(
    tar: Path, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "cog_triton")
    first = fetch(settings, str(tar))
    before = first.stat().st_ino
    assert "Unpacking" in caplog.text
    caplog.clear()
    assert fetch(settings, str(tar)) == first
    assert first.stat().st_ino == before
    assert caplog.text == ""


def test_changed_tar_is_unpacked_again(tar: Path, settings: Settings, tmp_path: Path) -> None:
    first = fetch(settings, str(tar))
    (tmp_path / "engine" / "another").write_text("file")
    pack(tmp_path / "engine", tar)
    second = fetch(settings, str(tar))
    assert second != first
    assert (second / "another").read_text() == "file"


def test_a_tar_without_a_manifest_is_served_with_a_warning(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine(tmp_path / "engine")
    (tmp_path / "engine" / engine_manifest.MANIFEST_NAME).unlink()
    fetch(settings, str(original_tar(tmp_path / "old.tar", tmp_path / "engine")))
    assert "old.tar has no cog-triton.json" in caplog.text


def test_unpacked_engine_with_a_missing_file_is_not_served(tar: Path, settings: Settings) -> None:
    directory = fetch(settings, str(tar))
    (directory / "config.json").unlink()
    with pytest.raises(EngineCorrupt, match=r"config\.json is in the manifest but missing"):
        fetch(settings, str(tar))


def test_missing_weights_are_reported(settings: Settings, tmp_path: Path) -> None:
    for weights in (str(tmp_path / "x.tar"), f"file://{tmp_path}/x.tar?token=SECRET"):
        with pytest.raises(ModelUnavailable, match=r"x\.tar'.*no such file") as caught:
            fetch(settings, weights)
        assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    "weights",
    [
        "ftp://host/engine.tar",
        "s3://bucket",
        "http://[::1/engine.tar",
        "http://127.0.0.1:1\x00/engine.tar",
        "file://elsewhere/engine.tar",
    ],
)
def test_unsupported_urls_are_reported(weights: str, settings: Settings) -> None:
    with pytest.raises(ModelUnavailable, match="COG_WEIGHTS="):
        fetch(settings, weights)


def test_download_is_fetched_and_unpacked_once(
    tar: Path, settings: Settings, tmp_path: Path
) -> None:
    directory, requests = download(settings, [whole(tar.read_bytes())], times=2)
    assert files(directory) == files(tmp_path / "engine")
    assert [request.path for request in requests] == ["/engine.tar"]
    assert not leftovers(settings)


CUT = b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\ncut"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([whole(b"<html>", "404 No")], "404"),
        ([CUT, RESET], "engine.tar"),
    ],
)
def test_a_failed_download_is_reported_and_retried_on_the_next_start(
    answer: list[Part], said: str, tar: Path, settings: Settings
) -> None:
    with pytest.raises(ModelUnavailable, match=said):
        download(settings, answer)
    assert not leftovers(settings)
    assert download(settings, [whole(tar.read_bytes())])[0].is_dir()


def test_secrets_of_a_url_are_redacted(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "cog_triton")

    async def main(status: str) -> str:
        async with serving([whole(b"", status)]) as server:
            url = server.url.replace("http://", "http://user:hunter2@")
            url += "/engine.tar?X-Signature=hunter2"
            with pytest.raises(ModelUnavailable) as caught:
                await asyncio.to_thread(fetch, settings, url)
            return str(caught.value)

    for status in ("403 Forbidden", "404 Not Found"):
        said = asyncio.run(main(status)) + caplog.text
        assert "engine.tar" in said
        assert "hunter2" not in said


def test_download_that_is_not_a_tar_is_removed(tar: Path, settings: Settings) -> None:
    """Such as the page of a login, answered with 200."""

    async def main() -> Path:
        async with serving([whole(b"<html>please log in</html>")]) as server:
            url = f"{server.url}/engine.tar"
            with pytest.raises(EngineCorrupt):
                await asyncio.to_thread(fetch, settings, url)
            server.answer_with([whole(tar.read_bytes())])
            return await asyncio.to_thread(fetch, settings, url)

    assert asyncio.run(main()).is_dir()
