"""Environment and directory of Cog's HTTP server."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from cog_triton.errors import TritonStartFailed
from cog_triton.serving.coglet import cog_server

PLAIN = {"TOKIO_WORKER_THREADS": "1", "NO_COLOR": "1", "COG_HOST": "127.0.0.1"}
PLAIN |= {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cog_server, "PLACE", tmp_path / "coglet")
    monkeypatch.setattr(cog_server, "_READY_FILE", tmp_path / "run" / "cog")
    return tmp_path / "coglet"


def make(place: Path, name: str) -> Path:
    directory = place / "predictions" / name
    for part in ("inputs", "outputs"):
        (directory / part).mkdir(parents=True)
    return directory


def test_cog_listens_on_this_machine_only() -> None:
    module, *arguments = cog_server.command(["--host", "0.0.0.0"])[2:]
    assert module == "cog.server.http"
    assert arguments[-2:] == ["--host", "127.0.0.1"]


@pytest.mark.parametrize(
    ("name", "asked", "made"),
    [("COG_MAX_CONCURRENCY", asked, "500") for asked in ("501", "500")]
    + [("COG_MAX_CONCURRENCY", asked, asked) for asked in ("1", "x")]
    + [("TOKIO_WORKER_THREADS", asked, "1") for asked in ("1", "2")],
)
def test_slots_and_threads_are_within_what_cog_can_have(
    name: str, asked: str, made: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = {name: asked, "HOME": "/"}
    assert cog_server.environment(given) == {**given, **PLAIN, name: made}
    assert (f"{name}={asked}: " in caplog.text) is (asked != made)


@pytest.mark.parametrize("directory", ["run/cog", "/proc/nothing/cog"])
def test_a_readiness_file_is_given_up_where_it_cannot_be_written(
    directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cog_server.environment({}) == PLAIN
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(cog_server, "_READY_FILE", tmp_path / directory)
    for _ in range(2):
        made = cog_server.environment({"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
        assert ("KUBERNETES_SERVICE_HOST" in made) is (directory == "run/cog")
    assert (tmp_path / "run/cog").is_dir() is (directory == "run/cog")


def test_the_place_is_made_for_one_user_and_left_once_it_is_empty(place: Path) -> None:
    for _ in range(2):
        cog_server.take_place()
        assert place.stat().st_mode & 0o777 == 0o700
    make(place, "one")
    for name in ("", ".", "..", "../other", "/tmp", "one/.."):
        cog_server.remove(name)
    cog_server.leave_place()
    assert (place / "predictions" / "one" / "outputs").is_dir()
    for _ in range(2):
        cog_server.remove("one")
        cog_server.leave_place()
        assert not place.exists()


@pytest.mark.parametrize("part", ["", "predictions"])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("file", "is no directory, so Cog does not start, "),
        ("link", "is no directory, "),
        ("full", "cannot be written, "),
        ("12345", "belongs to the user 12345, "),
        ("65534", "belongs to the user nobody (65534), "),
    ],
)
def test_a_place_that_is_not_ours_is_refused(
    part: str, kind: str, reason: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale, found, moved = make(place, "one"), place / part, place.with_name("moved")
    os.utime(stale, (0, 0))
    if kind == "full":
        monkeypatch.setattr(os, "access", lambda path, _: path != found)
    elif kind.isdecimal():
        if os.geteuid() != 0:
            pytest.skip("only root can be two users")
        os.chown(found, int(kind), -1)
    else:
        found.rename(moved)
        found.symlink_to(moved) if kind == "link" else found.touch()
    with pytest.raises(TritonStartFailed) as caught:
        cog_server.take_place()
    assert caught.value.detail.startswith(f"{found} {reason}")
    assert kind == "file" or stale.is_dir()


def test_a_start_removes_what_a_killed_server_left(place: Path) -> None:
    old, new, spilled = (make(place, name) for name in ("old", "new", "spilled"))
    (spilled / "outputs" / "file").touch()
    for directory in (old, spilled):
        os.utime(directory, (time.time() - 7200,) * 2)
    cog_server.take_place()
    assert not old.exists()
    assert (new / "outputs").is_dir()
    assert (spilled / "outputs" / "file").is_file(), "coglet has yet to read it"
