"""A client's run: its runner as a subprocess with a time limit, and the checks that it prints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite.client_list import Client
from suite.environments import HOME, NODE, command_of

if TYPE_CHECKING:
    from suite.suite_servers import Servers

ALONE = {
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "127.0.0.1,localhost",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "PYTHONUNBUFFERED": "1",
    "NO_COLOR": "1",
}
"""What keeps a client from anything but the server: a proxy that nobody listens as."""

LIMIT_S = 300


@dataclass(frozen=True)
class Check:
    """What one check found."""

    name: str
    ok: bool
    detail: str


@dataclass
class Row:
    """A client's checks."""

    client: Client
    checks: list[Check] = field(default_factory=list)

    @property
    def well(self) -> bool:
        return bool(self.checks) and all(check.ok for check in self.checks)


def run(client: Client, servers: Servers, only: str, verbose: bool) -> Row:
    """Run the checks with `only` in their names, and tell how it goes."""
    _progress(f"{client.name}: environment")
    command = command_of(client)
    _progress(f"{client.name}: servers")
    work = HOME / "work" / client.name
    work.mkdir(parents=True, exist_ok=True)
    described: dict[str, Any] = {kind: servers.described(kind) for kind in client.servers}
    described["work"] = str(work)
    if client.command:
        described["packages"] = str(NODE / "node_modules")
    environment = {**os.environ, **ALONE, "COG_TRITON_SUITE": json.dumps(described)}
    environment["PATH"] = f"{Path(command[0]).parent}:{os.environ['PATH']}"
    row = Row(client)
    began = time.monotonic()
    with (work / "stderr.log").open("w") as log:
        process = subprocess.Popen(
            [*command, client.name, only],
            env=environment,
            cwd=work,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        try:
            text, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate()
        finally:
            with suppress(ProcessLookupError):  # nor what it left behind
                os.killpg(process.pid, signal.SIGKILL)
    for line in text.splitlines():
        if line.startswith('{"check":'):
            found = json.loads(line)
            row.checks.append(Check(found.pop("check"), **found))
    if process.returncode:
        last = (work / "stderr.log").read_text()[-2000:]
        row.checks.append(Check("runs to its end", False, f"exit {process.returncode}: {last}"))
    _tell(row, time.monotonic() - began, verbose)
    return row


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text} ...", end="", file=sys.stderr, flush=True)


def _tell(row: Row, seconds: float, verbose: bool) -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    passed = sum(check.ok for check in row.checks)
    name = f"{row.client.name} {row.client.version()}"
    print(f"{name:32} {passed} of {len(row.checks)} in {seconds:.0f} s", flush=True)
    for check in row.checks:
        if verbose or not check.ok:
            print(f"  {'ok' if check.ok else 'FAILED':6} {check.name}: {check.detail}", flush=True)
