"""Environments of clients: one of each hash-pinned lock, made again when that changes."""

from __future__ import annotations

import hashlib
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from suite.client_list import NODE_LOCK, ROOT, RUNNERS, Client

HOME = ROOT / ".work" / "clients"
NODE = HOME / "node"

_UV_SETTINGS = runpy.run_path(str(ROOT / "scripts" / "bring_uv.py"))["uv_settings"]
INSTALLERS = {**os.environ, **_UV_SETTINGS()}
"""The caller's environment, of which clients get little: how to reach the package index."""


_NEEDED = {
    "uv": "make setup leaves it in .venv",
    "npm": "Debian's package npm",
    "node": "Debian's package nodejs, 20 or newer",
}


class EnvironmentFailed(RuntimeError):
    """An installer's last lines."""


def command_of(client: Client) -> list[str]:
    """The command that runs `client`; its environment is made first if need be."""
    if client.npm:
        _kept(NODE, NODE_LOCK, _install_node)
        if client.command:
            return [sys.executable, str(client.runner)]
        # By a link beside the packages, which modules find from where they lie.
        return [
            *(_found("node"), "--preserve-symlinks", "--preserve-symlinks-main"),
            str(NODE / RUNNERS.name / client.runner.name),
        ]
    directory = HOME / client.lock.stem
    _kept(directory, client.lock, _install)
    return [str(directory / "bin" / "python"), str(client.runner)]


def _kept(directory: Path, lock: Path, install: Callable[[Path, Path], None]) -> None:
    stamp = directory / "lock.sha256"
    wanted = hashlib.sha256(lock.read_bytes() + sys.version.encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(directory, ignore_errors=True)
        directory.parent.mkdir(parents=True, exist_ok=True)
        install(directory, lock)
        stamp.write_text(wanted)


def _found(program: str) -> str:
    """A program of this environment or of PATH."""
    path = shutil.which(program, path=f"{Path(sys.executable).parent}:{INSTALLERS.get('PATH', '')}")
    if path is None:
        raise EnvironmentFailed(f"needs {program}: {_NEEDED[program]}")
    return path


def _install(directory: Path, lock: Path) -> None:
    uv = _found("uv")
    into = ["--no-config", "--quiet", "--python"]
    _do([uv, "venv", *into, sys.executable, str(directory)])
    rules = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "-r", str(lock)]
    _do([uv, "pip", "install", *into, str(directory / "bin" / "python"), *rules])


def _install_node(directory: Path, lock: Path) -> None:
    """Without scripts of packages: what they would fetch or build is not locked."""
    directory.mkdir()
    for path in (lock, lock.with_name("package.json")):
        shutil.copy(path, directory)
    (directory / RUNNERS.name).symlink_to(RUNNERS)
    rules = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier"]
    _do([_found("npm"), "ci", *rules, "--prefix", str(directory)])


def _do(command: list[str]) -> None:
    done = subprocess.run(
        command, env=INSTALLERS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-20:])
        raise EnvironmentFailed(f"{' '.join(command[:3])} ...: exit code {done.returncode}\n{last}")
