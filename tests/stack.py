"""A running ``cog-triton serve``, reached as its users reach it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import httpx

from cog_triton.system import reaper
from cog_triton.system.ports import free_ports

REPOSITORY = Path(__file__).parents[1]
STARTS = "PYTEST_SERVER_STARTS"
"""Names the file with a line for each start of a server; tests/conftest.py counts them."""
_TLS = httpx.create_ssl_context()
"""For health checks, which are without TLS: httpx would read the certificates for each, 26 ms."""


def note_start(command: str) -> None:
    """Count the start of a server."""
    if STARTS in os.environ:
        with Path(os.environ[STARTS]).open("a") as starts:
            starts.write(f"{command}\n")


def wait_until(condition: Any, seconds: float = 180.0) -> Any:
    """The first true value of `condition()`; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not so within {seconds} s")
        time.sleep(0.02)
    return value


def processes_of(work_dir: Path) -> dict[int, str]:
    """Command lines of the living processes that run with this COG_TRITON_WORK_DIR."""
    mark = f"COG_TRITON_WORK_DIR={work_dir}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if line:
                    found[int(entry.name)] = line
        except OSError:
            continue
    return found


def start_times(stack: "Stack") -> dict[int, str]:
    """Every process and when it started: a restart shows, whatever was answered."""
    return {
        pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        for pid in processes_of(stack.work_dir)
    }


def shared_memory(pids: Iterable[int]) -> list[str]:
    """Triton's files in /dev/shm: their names tell which process started it."""
    mine = tuple(f"cog_triton_{pid}_" for pid in pids)
    return [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(mine)]


def mapped(pids: Iterable[int]) -> set[str]:
    """Files in /dev/shm that these processes have mapped, whatever their names."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line}
    return found


def predict(url: str, **values: Any) -> dict[str, Any]:
    """The answer to a prediction, and its `http_status`."""
    response = httpx.post(f"{url}/predictions", json={"input": values}, timeout=60)
    body: dict[str, Any] = response.json()
    return {"http_status": response.status_code, **body}


def text_of(prediction: dict[str, Any]) -> str:
    """The whole output; fails with all of the answer if there is none."""
    assert prediction.get("status") == "succeeded", prediction
    return "".join(prediction["output"])


def sse(chunks: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(event, data) pairs of a server-sent event stream, as they arrive."""
    event = ""
    for line in chunks:
        if line.startswith("event: "):
            event = line[7:]
        elif line.startswith("data: "):
            yield event, json.loads(line[6:])


class Stack:
    """Cog, Triton and the engine, on free ports and in a work directory of their own."""

    def __init__(self, work_dir: Path, engine: str | None, **environment: str) -> None:
        self.work_dir = work_dir
        self.port, self.http, self.grpc, self.metrics, self.openai = free_ports(5)
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COG_TRITON_WORK_DIR": str(work_dir),
            "PORT": str(self.port),
            "TRITON_HTTP_PORT": str(self.http),
            "TRITON_GRPC_PORT": str(self.grpc),
            "TRITON_METRICS_PORT": str(self.metrics),
            "OPENAI_PORT": str(self.openai),
            **environment,
        }
        self.url = f"http://127.0.0.1:{self.port}"
        self.triton = f"http://127.0.0.1:{self.http}"
        self.own = f"http://127.0.0.1:{self.openai}"
        self.command = [sys.executable, "-m", "cog_triton", "serve", *([engine] if engine else [])]
        self.process: subprocess.Popen[bytes] | None = None
        self.log = work_dir.with_suffix(".out")
        self.cwd: Path | None = None

    def start(self) -> None:
        note_start(" ".join(self.command))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command, env=self.environment, cwd=self.cwd, stdout=log, stderr=log
            )

    @contextmanager
    def served(self) -> Iterator[Self]:
        """Started and ready; closed in the end."""
        self.start()
        try:
            self.until_ready()
            yield self
        finally:
            self.close()

    @property
    def output(self) -> str:
        return self.log.read_text()

    def health(self) -> str:
        try:
            return str(
                httpx.get(f"{self.url}/health-check", timeout=60, verify=_TLS).json()["status"]
            )
        except httpx.TransportError:
            return "UNREACHABLE"

    def until_ready(self) -> None:
        assert self.process is not None
        wait_until(lambda: "Ready in" in self.output or self.process.poll() is not None)
        assert self.process.poll() is None, self.output
        assert self.health() == "READY"

    def finish(self, number: int | None = None, seconds: float = 120) -> tuple[int, str]:
        """Send a signal if asked to; exit code and output once it has ended."""
        assert self.process is not None
        if number is not None:
            self.process.send_signal(number)
        return self.process.wait(seconds), self.output

    def close(self) -> None:
        """Kill all of it at once, which saves the seconds that Triton takes to stop."""
        pids = {*processes_of(self.work_dir)}
        shared = mapped(pids)
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        while left := processes_of(self.work_dir):
            pids |= left.keys()
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for pid in pids:
            reaper.unlink_shm(f"cog_triton_{pid}_")
        for path in shared:
            Path(path).unlink(missing_ok=True)

    def predict(self, prompt: str = "Say hello.", **values: Any) -> dict[str, Any]:
        return predict(self.url, prompt=prompt, **values)

    @contextmanager
    def stream(self, prompt: str, **values: Any) -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
        with httpx.stream(
            "POST",
            f"{self.url}/predictions",
            json={"input": {"prompt": prompt, **values}},
            headers={"Accept": "text/event-stream"},
            timeout=60,
        ) as response:
            assert response.status_code == 200, response.read()
            yield sse(response.iter_lines())

    def engine_requests(self, kind: str = "active") -> int:
        """The engine's own count of live requests, as Triton's /metrics shows it by model."""
        found = [
            int(float(line.split()[-1]))
            for line in httpx.get(f"http://127.0.0.1:{self.metrics}/metrics").text.splitlines()
            if line.startswith("nv_trt_llm_request_metrics{") and f'"{kind}"' in line
        ]
        assert found, "no such metric"
        return sum(found)

    def requests(self) -> float:
        """The server's count of requests that run or wait, as its /metrics shows it."""
        text = httpx.get(f"{self.own}/metrics", timeout=60).text
        found = re.findall(r"^cog_triton_requests_(?:running|waiting) (\S+)", text, re.MULTILINE)
        assert len(found) == 2
        return sum(map(float, found))


def pids_of(stack: Stack, word: str) -> list[int]:
    """Processes of this stack with `word` in their own program, not in that of their reaper."""
    lines = processes_of(stack.work_dir).items()
    return [pid for pid, line in lines if word in line and "reaper.py" not in line]


def pid_of(stack: Stack, word: str) -> int:
    """The first of them, once there is one."""
    return int(wait_until(lambda: next(iter(pids_of(stack, word)), 0)))
