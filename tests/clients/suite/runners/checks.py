"""What runners share: where the servers are, and checks that print a JSON line each."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIVEN: dict[str, Any] = json.loads(os.environ["COG_TRITON_SUITE"])
_CHECKS: list[tuple[str, Callable[[], object]]] = []


@dataclass(frozen=True)
class Server:
    """Addresses of a server: `openai` ends in /v1, `http` and `grpc` have no scheme."""

    openai: str
    cog: str
    http: str
    grpc: str
    metrics: str
    model: str
    tokenizer: str
    """A directory that transformers loads."""
    places: int
    """Of the mock: sequences at once; more are refused, none wait."""
    fields: dict[str, list[str]]
    """Names of the request fields that the server knows, by API."""

    @property
    def origin(self) -> str:
        """The address without /v1, which some clients add."""
        return self.openai.removesuffix("/v1")

    def knows(self, api: str, parameters: type) -> None:
        """Fail for a field of a client's parameters that the server does not know."""
        unknown = parameters.__annotations__.keys() - self.fields[api]
        assert not unknown, f"{api}: the server does not know {sorted(unknown)}"

    def metric(self, name: str) -> float:
        """The sum of ``cog_triton_NAME`` over its labels."""
        pattern = rf"^cog_triton_{name}(?:\{{[^}}]*\}})? (\S+)$"
        return sum(map(float, re.findall(pattern, self._read(self.metrics), re.MULTILINE)))

    def engine_requests(self) -> float:
        """Requests that the engine has now, as Triton's metrics tell."""
        pattern = r'^nv_trt_llm_request_metrics\{[^}]*"active"[^}]*\} (\S+)$'
        text = self._read(f"{self.metrics}/triton")
        return sum(map(float, re.findall(pattern, text, re.MULTILINE)))

    def kill_engine(self) -> None:
        """SIGKILL to the mock's process, which has the tokenizer's directory in its arguments."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                line = path.read_text()
                if "engine_process\0" in line and self.tokenizer in line:
                    os.kill(int(path.parent.name), signal.SIGKILL)

    def _read(self, url: str) -> str:
        with urllib.request.urlopen(url) as answer:
            return str(answer.read().decode())

    @contextmanager
    def stops_a_generation(self, fewer_than: int) -> Iterator[None]:
        """The body starts one and leaves: it is cancelled, after fewer tokens than it asked for."""
        tokens, cancelled = self.metric("generation_tokens_total"), self._cancelled()
        yield
        until(lambda: self._cancelled() > cancelled and not self.metric("requests_running"))
        made = self.metric("generation_tokens_total") - tokens
        assert made < fewer_than, f"{made} tokens were made of {fewer_than}"

    def _cancelled(self) -> float:
        return self.metric("requests_cancelled_total")


def server(kind: str) -> Server:
    """The server of a kind that the client is listed with."""
    return Server(**GIVEN[kind])


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait for `condition`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds:.0f} s"
        time.sleep(0.05)


def add(name: str, function: Callable[[], object]) -> None:
    """Add a check, which fails by raising."""
    _CHECKS.append((name, function))


def check(function: Callable[[], object]) -> Callable[[], object]:
    """Make a function a check; its name, in words, is the check's."""
    add(function.__name__.replace("_", " "), function)
    return function


def raises(kind: type[BaseException], call: Callable[[], object]) -> Any:
    """The exception of this type that `call` raises."""
    try:
        found = call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}, but {found!r}")


def run(*command: str | Path, code: int = 0, text: str = "", **environment: str) -> str:
    """Run a command with these variables besides; what it prints, with its errors if it fails."""
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        input=text,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == code, f"{done.returncode}: {(done.stdout + done.stderr)[-1500:]}"
    return done.stdout + (done.stderr if code else "")


def main() -> None:
    """Run the checks; ``argv[2]``, if any, is what is in the names of those that do."""
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    for name, function in _CHECKS:
        if only not in name:
            continue
        try:
            detail, ok = str(function() or ""), True
        except Exception as error:  # noqa: BLE001  whatever a client raises is its result
            traceback.print_exc()
            detail, ok = f"{type(error).__name__}: {error}", False
        line = {"check": name, "ok": ok, "detail": detail[:1000]}
        print(f"\n{json.dumps(line)}", flush=True)  # clients leave lines open
