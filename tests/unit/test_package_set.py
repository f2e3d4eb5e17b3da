"""Packages that an installation lacks: fetched by hash, once, whole, and found by children."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from cog_triton.download import disk_space
from cog_triton.errors import DiskFull, MissingExtra, ModelUnavailable
from cog_triton.packages import package_set
from cog_triton.packages.package_set import DEMO, OPENVINO, TRITONSERVER, UV, PackageSet, provide

ROOT = Path(__file__).parents[2]
SMALL = PackageSet("small", "a small package", ("carrier-of-nothing",), 1000, 1000)


def wheel(directory: Path) -> str:
    """Write a wheel that depends on what is nowhere; its entry in a lock."""
    name = "carrier_of_nothing"
    path = directory / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    metadata = "Metadata-Version: 2.1\nName: carrier-of-nothing\nVersion: 1.0\n"
    files = {
        f"{name}/__init__.py": "VALUE = 7\n",
        f"{info}/METADATA": f"{metadata}Requires-Dist: is-nowhere-to-be-found\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"carrier-of-nothing==1.0 \\\n    --hash=sha256:{digest}\n"


@pytest.fixture(autouse=True)
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's lock: of one wheel, which pip finds without an index."""
    path = tmp_path / "serve.lock"
    path.write_text(wheel(tmp_path))
    monkeypatch.setattr(package_set, "data_file", lambda _name: path)
    monkeypatch.setattr(package_set, "find_uv", lambda: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
        monkeypatch.setenv(f"UV_{name}", value)
    return path


def test_what_lacks_is_fetched_once_and_found_by_children(tmp_path: Path) -> None:
    lines: list[str] = []
    store = tmp_path / "packages"
    provide(SMALL, store, lines.append)
    (line,) = lines
    assert "a small package: fetching carrier-of-nothing==1.0 (1 kB, once, into" in line
    found = [sys.executable, "-c", "import carrier_of_nothing as c; print(c.VALUE, c.__file__)"]
    done = subprocess.run(found, capture_output=True, text=True, check=True)
    value, path = done.stdout.split()
    assert value == "7"
    assert Path(path).is_relative_to(store)
    provide(SMALL, store, lines.append)
    assert len(lines) == 1
    (directory,) = store.iterdir()
    assert os.environ["PYTHONPATH"] == str(directory)
    assert sys.path[-1] == str(directory)


def test_what_is_installed_is_not_fetched(tmp_path: Path) -> None:
    for wanted in (TRITONSERVER, OPENVINO, DEMO):
        provide(wanted, tmp_path / "packages", pytest.fail)
    assert not (tmp_path / "packages").exists()


def test_another_content_is_refused_and_leaves_nothing(tmp_path: Path, lock: Path) -> None:
    lock.write_text(lock.read_text()[:-9] + "00000000\n")
    with pytest.raises(ModelUnavailable, match="a small package cannot be fetched"):
        provide(SMALL, tmp_path / "packages", lambda _line: None)
    assert list((tmp_path / "packages").iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_another_one_is_waited_for(
    tmp_path: Path,
) -> None:
    lines: list[str] = []
    store = tmp_path / "packages"
    provide(SMALL, store, lines.append)
    (directory,) = store.iterdir()
    left, aside = store / f".{directory.name}.killed", tmp_path / "aside"
    left.mkdir()
    directory.rename(aside)
    sys.path.remove(str(directory))
    provide(SMALL, store, lines.append)
    assert not left.exists()
    directory.rename(left)
    sys.path.remove(str(directory))
    waited = threading.Event()

    def echo(line: str) -> None:
        lines.append(line)
        waited.set()

    with disk_space.writing(directory, "them", echo, threading.Event()):
        second = threading.Thread(target=provide, args=(SMALL, store, echo))
        second.start()
        assert waited.wait(30)
        assert "another process is fetching it; waiting" in lines[-1]
        aside.rename(directory)  # the first one has done it
    second.join()
    assert len(lines) == 3


def test_no_room_and_no_installer_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as full:
        full.setattr(disk_space, "_free", lambda _directory: 10)
        with pytest.raises(DiskFull, match="a small package: needs 2 kB more"):
            provide(SMALL, tmp_path / "packages", lambda _line: None)
    with monkeypatch.context() as bare:
        bare.setattr(package_set.importlib.util, "find_spec", lambda _name: None)
        with pytest.raises(MissingExtra, match="a small package is to be fetched, and neither uv"):
            provide(SMALL, tmp_path / "packages", lambda _line: None)
    monkeypatch.setattr(package_set.platform, "machine", lambda: "aarch64")
    with pytest.raises(MissingExtra, match="wheels for Linux on x86-64 alone"):
        provide(SMALL, tmp_path / "packages", lambda _line: None)


def test_the_lock_has_every_set() -> None:
    path = ROOT / "requirements" / "python.lock"
    for wanted in (TRITONSERVER, OPENVINO, DEMO, UV):
        text = package_set.locked(path, wanted.distributions)
        assert set(package_set.versions(text)) == {*wanted.distributions}
