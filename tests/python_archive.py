"""An archive of a Python as uv downloads them, and the list of downloads that names it.

    python tests/python_archive.py PREFIX DIRECTORY

The Python at PREFIX (with libpython, as pyenv builds it) becomes what python-build-standalone
publishes: a directory `python` whose prefix is /install, which uv replaces. Its libraries beyond
libc go along where patchelf is here to point it at them. UV_PYTHON_DOWNLOADS_JSON_URL takes the
list's URL.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

_UNWANTED = ("test", "idlelib", "tkinter", "turtledemo", "site-packages", "__pycache__")
_OF_LIBC = re.compile(r"(linux-vdso|ld-linux.*|lib(c|m|dl|rt|pthread|util))\.so")


def _with_libraries(root: Path) -> None:
    library, private = root / "lib", root / "lib" / "private"
    private.mkdir()
    programs = [*root.glob("bin/*"), *library.glob("libpython*.so.*"), *library.rglob("*-gnu.so")]
    for program in programs:
        linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for name, source in re.findall(r"(\S+) => (/\S+)", linked):
            if not _OF_LIBC.match(name) and not (library / name).exists():
                shutil.copy(source, private / name)
        up = Path(*[".."] * (len(program.relative_to(root).parts) - 1))
        subprocess.run(
            [
                "patchelf",
                "--force-rpath",
                "--set-rpath",
                f"$ORIGIN/{up}/lib:$ORIGIN/{up}/lib/private",
                program,
            ],
            check=True,
            timeout=60,
        )


def make(prefix: Path, directory: Path) -> Path:
    """Write both below `directory`; returns the list."""
    source = next(prefix.glob("bin/python3.[0-9]*[0-9]"))
    version = subprocess.run(
        [source, "-c", "import platform; print(platform.python_version())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    major, minor, patch = map(int, version.split("."))
    directory.mkdir(parents=True, exist_ok=True)
    archive = directory / f"cpython-{version}-x86_64-unknown-linux-gnu-install_only.tar.gz"
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary, "python")
        name = f"python{major}.{minor}"
        shutil.copytree(
            prefix / "lib" / name, root / "lib" / name, ignore=shutil.ignore_patterns(*_UNWANTED)
        )
        (root / "lib" / name / "site-packages").mkdir()
        (root / "bin").mkdir()
        shutil.copy(source, root / "bin" / name)
        for link in ("python", "python3"):
            (root / "bin" / link).symlink_to(name)
        shutil.copy(prefix / "lib" / f"lib{name}.so.1.0", root / "lib")
        for data in (root / "lib" / name).glob("_sysconfigdata_*.py"):
            data.write_text(data.read_text("utf-8").replace(str(prefix), "/install"), "utf-8")
        if shutil.which("patchelf"):
            _with_libraries(root)
        with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
            tar.add(root, "python")
    described = {
        "name": "cpython",
        "arch": {"family": "x86_64", "variant": None},
        "os": "linux",
        "libc": "gnu",
        **{"major": major, "minor": minor, "patch": patch, "prerelease": ""},
        "url": archive.as_uri(),
        "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
        "variant": None,
        "build": "20260101",
    }
    listed = directory / "downloads.json"
    listed.write_text(json.dumps({f"cpython-{version}-linux-x86_64-gnu": described}), "utf-8")
    return listed


if __name__ == "__main__":
    print(make(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()))
