"""The stand-in of nix2container refuses what the real one refuses, and applies permissions."""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

import pytest
from factory import HERE

sys.path.insert(0, str(HERE / "standin" / "nix2container"))

import gotar
import layers


def path(directory: Path, **options: object) -> dict[str, object]:
    """A store path copied to the image's root."""
    rewrite = {"regex": f"^{directory}", "repl": ""}
    return {"path": str(directory), "options": {"rewrite": rewrite, **options}}


def tree(directory: Path, **files: str) -> Path:
    """A directory with files."""
    directory.mkdir()
    for name, text in files.items():
        (directory / name).write_text(text)
    return directory


def test_two_types_of_one_name_are_refused(tmp_path: Path) -> None:
    one, two = tree(tmp_path / "one"), tree(tmp_path / "two")
    (one / "bin").symlink_to("usr/bin")
    (two / "bin").mkdir()
    with pytest.raises(SystemExit, match="the file '/bin' already exists in the graph with mode"):
        layers.nodes_of([path(one), path(two)])


def test_two_modes_of_one_name_are_refused(tmp_path: Path) -> None:
    one, two = tree(tmp_path / "one", a="x"), tree(tmp_path / "two", a="x")
    (one / "a").chmod(0o755)
    with pytest.raises(SystemExit, match=r"mode '-rwxr-xr-x' .* with mode '-rw-r--r--'"):
        layers.nodes_of([path(one), path(two)])


def test_two_sizes_of_one_name_are_refused(tmp_path: Path) -> None:
    one, two = tree(tmp_path / "one", a="x"), tree(tmp_path / "two", a="xy")
    with pytest.raises(SystemExit, match=r"with size '1' .* with size '2'"):
        layers.nodes_of([path(one), path(two)])


def test_two_permissions_of_one_directory_are_refused(tmp_path: Path) -> None:
    one, two = tree(tmp_path / "one"), tree(tmp_path / "two")
    for directory in (one, two):
        (directory / "opt").mkdir()
    perms = [{"regex": "/opt$", "mode": "1777"}]
    with pytest.raises(SystemExit, match="'/opt' already exists in the tar with perms"):
        layers.nodes_of([path(one, perms=perms), path(two)])
    layers.nodes_of([path(one, perms=perms), path(two, perms=perms)])


def test_permissions_are_applied(tmp_path: Path) -> None:
    one = tree(tmp_path / "one", a="x", b="y")
    buffer = io.BytesIO()
    layers.write_tar([path(one, perms=[{"regex": "/a$", "mode": "0600", "uid": 7}])], buffer)
    buffer.seek(0)
    with tarfile.open(fileobj=buffer) as archive:
        found = {item.name: (item.mode, item.uid, item.mtime) for item in archive}
    assert found == {
        "": (0o755, 0, 1),  # the root, as tarfile reads it
        "/a": (0o600, 7, 1),
        "/b": (0o644, 0, 1),
    }


@pytest.mark.parametrize("length", [99, 100, 101, 155, 255, 256, 300])
def test_long_names_survive_the_tar(length: int, tmp_path: Path) -> None:
    name = ("/" + "d" * 60 + "/" + "e" * 60 + "/" + "f" * 240)[:length]
    entry = gotar.Entry(name=name, type="2", mode=0o777, linkname="t" * length)
    data = gotar.header(entry) + gotar.END
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        (item,) = archive.getmembers()
    assert (item.name, item.linkname, item.issym()) == (name, "t" * length, True)
