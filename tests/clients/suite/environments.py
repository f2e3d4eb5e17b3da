"""Virtual environments of clients: one each, from its hash-pinned lock, kept until that changes."""

from __future__ import annotations

import hashlib
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from suite.client_list import ROOT, Client

HOME = ROOT / ".work" / "clients"


_UV_SETTINGS = runpy.run_path(str(ROOT / "scripts" / "bring_uv.py"))["uv_settings"]
INSTALLERS = {**os.environ, **_UV_SETTINGS()}
"""The caller's environment, of which clients get little: how to reach the package index."""


class EnvironmentFailed(RuntimeError):
    """An installer's last lines."""


def python_of(client: Client) -> Path:
    """The interpreter that runs `client`; its environment is made first if need be."""
    if client.lock is None:
        return Path(sys.executable)
    directory = HOME / client.name
    python = directory / "bin" / "python"
    stamp = directory / "lock.sha256"
    wanted = hashlib.sha256(client.lock.read_bytes() + sys.version.encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(directory, ignore_errors=True)
        directory.parent.mkdir(parents=True, exist_ok=True)
        _install(directory, python, client.lock)
        stamp.write_text(wanted)
    return python


def _install(directory: Path, python: Path, lock: Path) -> None:
    """With the uv that set-up brought."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{INSTALLERS.get('PATH', '')}")
    if uv is None:
        raise EnvironmentFailed("needs uv, which make setup leaves in .venv")
    into = ["--no-config", "--quiet", "--python"]
    _do([uv, "venv", *into, sys.executable, str(directory)])
    rules = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "-r", str(lock)]
    _do([uv, "pip", "install", *into, str(python), *rules])


def _do(command: list[str]) -> None:
    done = subprocess.run(
        command, env=INSTALLERS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-20:])
        raise EnvironmentFailed(f"{' '.join(command[:3])} ...: exit code {done.returncode}\n{last}")
