"""Virtual environments of clients: one each, from its hash-pinned lock, kept until that changes."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from suite.client_list import ROOT, Client

HOME = ROOT / ".work" / "clients"
OLDEST = (3, 11)
"""The Python that locks are resolved for; newer ones take the same releases."""


CALLERS = dict(os.environ)
"""How this machine reaches its package index is the caller's; tests then run without it."""


class EnvironmentFailed(RuntimeError):
    """An installer's last lines."""


def python_of(client: Client) -> Path:
    """The interpreter that runs `client`; its environment is made first if need be."""
    if client.lock is None:
        return Path(sys.executable)
    if sys.version_info < OLDEST:
        raise EnvironmentFailed(
            f"needs Python {OLDEST[0]}.{OLDEST[1]} or newer: rm -r .venv; make setup PYTHON=..."
        )
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
    rules = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "-r", str(lock)]
    uv = shutil.which("uv")
    if uv:
        _do([uv, "--no-config", "venv", "--quiet", "--python", sys.executable, str(directory)])
        _do([uv, "--no-config", "pip", "install", "--quiet", "--python", str(python), *rules])
    else:
        _do([sys.executable, "-m", "venv", str(directory)])
        _do([str(python), "-m", "pip", "install", "--quiet", *rules])


def _do(command: list[str]) -> None:
    done = subprocess.run(
        command, env=CALLERS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-20:])
        raise EnvironmentFailed(f"{' '.join(command[:4])} ...: exit code {done.returncode}\n{last}")
