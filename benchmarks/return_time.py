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
import math
import os
import re
import signal
import statistics
import sys
import threading
import time
from datetime import datetime
from functools import partial
from pathlib import Path

import httpx
from _servers import Server, mock_server, status
from _servers import server as serving

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from faults.processes import by_role
from stack import wait_until

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


def engine_that_serves(server: Server) -> int:
    """Process id of the engine that serves."""
    number = ["1", *re.findall(STAGES["serves"], server.log.read_text("utf-8"))][-1]
    for pid in by_role(server.pid)["engine"]:
        if Path(f"/proc/{pid}/fd/1").readlink().name == f"engine-{number}.log":
            return pid
    raise ProcessLookupError(f"engine process {number} has gone")


def strike(server: Server, victim: str) -> dict[str, float]:
    """Kill the victim under a stream; the seconds until each stage was over."""
    stream = Stream(server)
    wait_until(lambda: len(stream.arrivals) > 5 or stream.error, PATIENCE_S)
    size = server.log.stat().st_size
    (pid,) = by_role(server.pid)[victim] if victim != "engine" else [engine_that_serves(server)]
    os.kill(pid, signal.SIGKILL)
    killed = time.time()
    # What was on its way is no sign of a return.
    wait_until(
        lambda: (
            stream.error
            or _stages(server.log, size, killed).get("ready", math.inf)
            < stream.arrivals[-1] - killed
        ),
        PATIENCE_S,
    )
    stream.close()
    if stream.error:
        raise RuntimeError(stream.error)
    times = _stages(server.log, size, killed)
    back = (at - killed for at in stream.arrivals)
    return {**times, LAST: next(at for at in back if at > times["ready"])}


def _stages(log: Path, size: int, killed: float) -> dict[str, float]:
    """Seconds from the kill to each stage, by the log after `size` bytes."""
    text, times = log.read_bytes()[size:].decode(), {}
    for stage, words in STAGES.items():
        if found := re.search(rf"^(\S+) .*{words}", text, re.MULTILINE):
            at = datetime.fromisoformat(found[1].replace("Z", "+00:00")).timestamp()
            times[stage] = at - killed
    return times


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
    with start as server:
        for number in range(options.rounds):
            if options.spare:
                wait_until(partial(_has_spare, server.log, number + 1), PATIENCE_S)
            time.sleep(_STABLE_S)
            rounds.append(strike(server, options.victim))
            print(f"round {number + 1}:", rounds[-1], flush=True)
            wait_until(lambda: status(server.url) == "READY", PATIENCE_S)
    stages = [*STAGES, LAST]
    print(f"| killed | {' | '.join(stages)} |\n|---{'|--:' * len(stages)}|")
    print(f"| {options.victim} | {' | '.join(_median(rounds, stage) for stage in stages)} |")


def _has_spare(log: Path, number: int) -> bool:
    """Whether so many spares have been ready so far."""
    return len(re.findall(r"spare engine \d+ is ready", log.read_text("utf-8"))) >= number


def _median(rounds: list[dict[str, float]], stage: str) -> str:
    """The median of a stage in seconds; a dash for one that was not needed."""
    found = [times[stage] for times in rounds if times.get(stage, -1.0) >= 0]
    return f"{statistics.median(found):.2f} s" if found else "-"


if __name__ == "__main__":
    main()
