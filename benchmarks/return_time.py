"""Return time: from the death of an engine process, or of tritonserver, to new tokens.

    .venv/bin/python benchmarks/return_time.py mock
    .venv/bin/python benchmarks/return_time.py engine.tar --victim tritonserver

Kills one process under a stream of `/v1`, and prints when each stage was over, in seconds from the
kill, as medians: the server has noticed the death and started another engine, which has loaded and
serves, the server is ready, and the stream has its next token. With `--spare` a spare engine takes
over (SPARE_ENGINE=1).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import threading
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path

import httpx
from _servers import Server, mock_server
from _servers import server as serving

STAGES = {
    "noticed": r"supervisor: Triton: ",
    "started": r"engine process (\d+) starts",
    "loaded": r"engine process (\d+) has loaded",
    "serves": r"engine process (\d+) serves",
    "ready": r"is ready again after",
}
"""Stages, by their lines in the server's log."""
LAST = "next token"
PATIENCE_S = 300.0
_ENGINE = b"cog_triton.backend.engine_process"
_STABLE_S = 6.0  # less readiness counts as a failed restart


class Stream:
    """One long stream, read on a thread; `arrivals` are the times of its tokens, by time.time()."""

    def __init__(self, server: Server) -> None:
        self.arrivals: list[float] = []
        self.error = ""
        self._closing = False
        self._url = f"{server.openai}/v1/completions"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        """Leave."""
        self._closing = True
        self._thread.join()

    def _run(self) -> None:
        body = {"model": "any", "prompt": "Tell me a story.", "max_tokens": 1500, "stream": True}
        with httpx.stream(
            "POST",
            self._url,
            json={**body, "temperature": 0, "min_tokens": 1500},
            timeout=PATIENCE_S,
        ) as response:
            for line in response.iter_lines():
                if self._closing:
                    return
                if line.startswith("data: {"):
                    self.arrivals.append(time.time())
                    if "error" in json.loads(line[6:]):
                        self.error = line
                        return


def until(condition: Callable[[], bool]) -> None:
    """Wait until `condition`."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so within {PATIENCE_S:g} s")
        time.sleep(0.02)


def is_ready(server: Server, http: httpx.Client) -> bool:
    """Whether the server takes requests."""
    try:
        answer = http.get(f"{server.url}/health-check")
    except httpx.TransportError:
        return False
    return bool(answer.json()["status"] == "READY")


def serving_engine(server: Server) -> int:
    """Process id of the engine that serves."""
    number = ["1", *re.findall(STAGES["serves"], server.log.read_text("utf-8"))][-1]
    for pid in server.pids:
        is_engine = _ENGINE in _words(pid)[1:3]
        if is_engine and Path(f"/proc/{pid}/fd/1").readlink().name == f"engine-{number}.log":
            return pid
    raise ProcessLookupError(f"engine process {number} has gone")


def _words(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return [b""]


def strike(server: Server, victim: str) -> dict[str, float]:
    """Kill the victim under a stream; the seconds until each stage was over."""
    stream = Stream(server)
    until(lambda: len(stream.arrivals) > 5 or bool(stream.error))
    size = server.log.stat().st_size
    pid = serving_engine(server)
    if victim == "tritonserver":
        (pid,) = (pid for pid in server.pids if _words(pid)[0].endswith(b"/bin/tritonserver"))
    os.kill(pid, signal.SIGKILL)
    killed = time.time()
    # What was on its way is no sign of a return.
    until(lambda: bool(stream.error) or _ready_at(server.log, size) < stream.arrivals[-1])
    stream.close()
    if stream.error:
        raise RuntimeError(stream.error)
    ready = _ready_at(server.log, size)
    text = server.log.read_bytes()[size:].decode()
    times = {LAST: next(at for at in stream.arrivals if at > ready) - killed}
    for stage, words in STAGES.items():
        if found := re.search(rf"^(\S+) .*{words}", text, re.MULTILINE):
            times[stage] = _time(found[1]) - killed
    return times


def _ready_at(log: Path, size: int) -> float:
    """When the server was ready again, by the log after `size` bytes; inf if it was not."""
    text = log.read_bytes()[size:].decode()
    found = re.search(rf"^(\S+) .*{STAGES['ready']}", text, re.MULTILINE)
    return _time(found[1]) if found else float("inf")


def _time(stamp: str) -> float:
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()


def main() -> None:
    """Print the table of one engine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("engine", help='an engine, or "mock"')
    parser.add_argument("--victim", choices=("engine", "tritonserver"), default="engine")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--spare", action="store_true", help="SPARE_ENGINE=1")
    options = parser.parse_args()
    own = {"SERVED_MODEL_NAME": "any", "SPARE_ENGINE": str(int(options.spare))}
    if options.engine == "mock":
        start = mock_server(tps=50, environment=own)
    else:
        start = serving(options.engine, environment=own)
    rounds = []
    with start as server, httpx.Client() as http:
        for number in range(options.rounds):
            if options.spare:
                until(partial(_has_spare, server.log, number + 2))
            time.sleep(_STABLE_S)
            rounds.append(strike(server, options.victim))
            print(f"round {number + 1}:", rounds[-1], flush=True)
            until(lambda: is_ready(server, http))
    stages = [*STAGES, LAST]
    print(f"| killed | {' | '.join(stages)} |\n|---{'|--:' * len(stages)}|")
    print(f"| {options.victim} | {' | '.join(_median(rounds, stage) for stage in stages)} |")


def _has_spare(log: Path, loads: int) -> bool:
    """Whether so many engines have loaded so far: one more than were needed."""
    return len(re.findall(STAGES["loaded"], log.read_text("utf-8"))) >= loads


def _median(rounds: list[dict[str, float]], stage: str) -> str:
    """The median of a stage in seconds; a dash for one that was not needed."""
    found = [times[stage] for times in rounds if times.get(stage, -1.0) >= 0]
    return f"{statistics.median(found):.2f} s" if found else "-"


if __name__ == "__main__":
    main()
