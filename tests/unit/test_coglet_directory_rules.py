"""What is removed below Cog's directory, and who may not have it."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cog_triton.doctor import hardware
from cog_triton.doctor.report import State
from cog_triton.errors import TritonStartFailed
from cog_triton.serving.coglet import prediction_directory

OTHER_USER = Path(__file__).parents[1] / "other_user.py"
SOMEONE, NOBODY = 12345, 65534
TWO_USERS = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
# A server's use of the directory: what it found, until its input ends; or its error.
SERVER = """
import json, os, sys
from pathlib import Path
from cog_triton.errors import TritonStartFailed
from cog_triton.serving.coglet import prediction_directory

def namespaces():
    capabilities = Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0]
    return [capabilities, *(os.readlink(f"/proc/self/ns/{name}") for name in ("user", "mnt"))]

prediction_directory.PLACE, options = Path(sys.argv[1]), json.loads(sys.argv[2])
if "mount fails" in options:
    server, mount = os.getpid(), prediction_directory.mount
    def failing(*arguments):
        if os.getpid() == server:
            raise PermissionError(1, "setgroups: not here")
        mount(*arguments)
    prediction_directory.mount = failing
before, found = namespaces(), {}
use = {} if "user namespaces" in options else {"user_namespace": False}
try:
    with prediction_directory.prediction_directory(**use) as found["shared"]:
        found["changed"] = [a != b for a, b in zip(before, namespaces())]
        print(json.dumps(found), flush=True)
        sys.stdin.read()
except TritonStartFailed as error:
    print(json.dumps({"error": str(error), "changed": namespaces() != before}))
"""


class Server:
    """One process as `user`, whom `refused` options of other_user.py may take calls from."""

    def __init__(
        self, place: Path, user: int, *options: str, refused: tuple[str, ...] = ()
    ) -> None:
        program = [sys.executable, "-c", SERVER, str(place), json.dumps(options)]
        self.process = subprocess.Popen(
            [sys.executable, str(OTHER_USER), *refused, str(user), *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def found(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def stop(self) -> str:
        """End it; what it logged."""
        _, logged = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, logged
        return logged


@pytest.fixture
def shared_place() -> Iterator[Path]:
    """A directory as /tmp/coglet, not made yet, which every user reaches."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o1777)
        yield Path(directory) / "coglet"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "coglet"
    monkeypatch.setattr(prediction_directory, "PLACE", place)
    return place


def make(place: Path, name: str) -> Path:
    directory = place / "predictions" / name
    for part in ("inputs", "outputs"):
        (directory / part).mkdir(parents=True)
    return directory


@pytest.mark.parametrize("name", ["", ".", "..", "../other", "/tmp", "one/.."])
def test_only_a_prediction_of_that_name_is_removed(place: Path, name: str) -> None:
    make(place, "one")
    (place / "other").mkdir()
    prediction_directory.remove(name)
    assert (place / "predictions" / "one" / "outputs").is_dir()
    assert (place / "other").is_dir()
    prediction_directory.remove("one")
    assert list((place / "predictions").iterdir()) == []
    prediction_directory.remove("one")


def test_files_that_coglet_has_yet_to_read_are_kept(place: Path) -> None:
    (make(place, "one") / "outputs" / "spilled").touch()
    prediction_directory.remove("one")
    assert (place / "predictions" / "one" / "outputs" / "spilled").is_file()


def test_a_start_removes_what_a_killed_server_left(place: Path) -> None:
    old, new = make(place, "old"), make(place, "new")
    past = time.time() - 7200
    os.utime(old, (past, past))
    prediction_directory._sweep(older_than=3600)
    assert not old.exists()
    assert (new / "outputs").is_dir()


@pytest.mark.parametrize("kind", ["file", "link", "part"])
def test_what_is_no_directory_is_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(prediction_directory, "namespace_refusal", lambda **_: "no namespaces")
    if kind == "file":
        place.touch()
    elif kind == "link":
        place.symlink_to(tmp_path)
    else:
        place.mkdir()
        (place / "output").touch()
    with pytest.raises(TritonStartFailed, match=r"is no directory.*\(no namespaces\)"):
        prediction_directory.require_usable()
    found = hardware.predictions()
    assert found.state is State.FAIL
    assert "user namespaces" in found.advice
    monkeypatch.setattr(prediction_directory, "namespace_refusal", lambda **_: None)
    prediction_directory.require_usable()
    assert hardware.predictions().state is State.OK


def test_a_directory_of_ones_own_may_be_shared(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction_directory, "namespace_refusal", lambda **_: "no namespaces")
    prediction_directory.require_usable()
    assert not place.exists()
    make(place, "one")
    prediction_directory.require_usable()
    assert hardware.predictions().found.endswith(f"share {place}: no namespaces")


def test_why_there_is_no_namespace_is_told() -> None:
    command = [sys.executable, "-m", "cog_triton.serving.coglet.prediction_directory"]
    refusing = [sys.executable, str(OTHER_USER), "--no-namespaces", str(os.geteuid()), *command]
    done = subprocess.run(refusing, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (1, "unshare: Operation not permitted")


@TWO_USERS
def test_a_user_enters_no_namespace_for_a_directory_of_its_own(shared_place: Path) -> None:
    first = Server(shared_place, SOMEONE, "user namespaces")
    assert first.found() == {"shared": "no other user has it", "changed": [False, False, False]}
    assert shared_place.stat().st_uid == SOMEONE
    assert first.stop() == ""
    assert not shared_place.exists()


@TWO_USERS
def test_a_user_beside_another_ones_directory_has_a_private_one(shared_place: Path) -> None:
    shared_place.mkdir()
    server = Server(shared_place, SOMEONE, "user namespaces")
    assert server.found() == {"shared": None, "changed": [False, True, True]}
    assert server.stop() == ""


@TWO_USERS
@pytest.mark.parametrize(
    ("user", "options", "refused", "reason"),
    [
        (SOMEONE, ("user namespaces",), ("--no-mounts",), "belongs to the user root"),
        (SOMEONE, ("user namespaces",), ("--no-namespaces",), "belongs to the user root"),
        (SOMEONE, (), (), "belongs to the user root"),
        (NOBODY, ("user namespaces",), (), "belongs to the user root"),
    ],
    ids=["mount refused", "unshare refused", "builds", "nobody"],
)
def test_who_may_not_have_a_private_one_is_refused_where_it_was(
    shared_place: Path,
    user: int,
    options: tuple[str, ...],
    refused: tuple[str, ...],
    reason: str,
) -> None:
    shared_place.mkdir()
    server = Server(shared_place, user, *options, refused=refused)
    found = server.found()
    assert reason in found["error"]
    assert not found["changed"]
    server.stop()


@TWO_USERS
@pytest.mark.parametrize("user", [SOMEONE, 0])
def test_a_server_without_mounts_stays_in_its_namespaces(shared_place: Path, user: int) -> None:
    server = Server(shared_place, user, "user namespaces", refused=("--no-mounts",))
    found = server.found()
    assert found["changed"] == [False, False, False]
    assert found["shared"]
    assert server.stop() == ""


@TWO_USERS
def test_a_namespace_that_is_half_made_ends_the_start(shared_place: Path) -> None:
    shared_place.mkdir()
    server = Server(shared_place, SOMEONE, "user namespaces", "mount fails")
    error = server.found()["error"]
    assert error.startswith("E2106 ")
    assert "cannot be made private: setgroups: not here" in error
    server.stop()


@TWO_USERS
def test_a_link_of_another_user_is_not_mounted_over(shared_place: Path, their_own: Path) -> None:
    shared_place.symlink_to(their_own)
    server = Server(shared_place, SOMEONE, "user namespaces")
    assert "is no directory" in server.found()["error"]
    server.stop()


@pytest.fixture
def their_own() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def test_the_last_server_of_a_user_removes_what_is_left(shared_place: Path) -> None:
    refused = ("--no-namespaces",)
    servers = [Server(shared_place, os.geteuid(), refused=refused) for _ in range(2)]
    for server in servers:
        assert server.found()["shared"]
    make(shared_place, "killed")
    servers[0].stop()
    assert (shared_place / "predictions" / "killed" / "outputs").is_dir()
    servers[1].stop()
    assert not shared_place.exists()


def test_who_keeps_the_lock_delays_nobody_for_long(shared_place: Path) -> None:
    shared_place.mkdir()
    taken = os.open(shared_place, os.O_RDONLY)
    fcntl.flock(taken, fcntl.LOCK_EX)
    server = Server(shared_place, os.geteuid(), refused=("--no-namespaces",))
    try:
        logged = server.stop()
    finally:
        os.close(taken)
    assert "cannot be locked" in logged
    assert "Resource temporarily unavailable" in logged
    assert shared_place.exists()


def test_a_directory_that_a_stop_removes_meanwhile_is_made_and_locked_anew(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, raced = fcntl.flock, []

    def remove_first(descriptor: int, operation: int) -> None:
        if not raced:
            raced.append(descriptor)
            place.rmdir()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    descriptor = prediction_directory._shared_lock()
    assert descriptor is not None
    assert os.path.samestat(os.fstat(descriptor), place.stat())
    other = os.open(place, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        lock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
    os.close(descriptor)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (subprocess.TimeoutExpired("python", 30), "timed out after 30 seconds"),
        (OSError(11, "Resource temporarily unavailable"), "Resource temporarily unavailable"),
    ],
)
def test_a_try_that_ends_in_no_answer_is_a_reason(
    place: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception, reason: str
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(subprocess, "run", failing)
    monkeypatch.setattr(prediction_directory, "namespaces", lambda *_: 0)
    assert reason in str(prediction_directory.namespace_refusal())
