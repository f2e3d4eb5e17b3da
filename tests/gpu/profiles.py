"""py-spy profiles of a server's Python processes under load."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import sleep

from endpoints import Endpoint
from load import measure
from prompts import Prompt
from servers import Server

_SECONDS = 8
_RATE = 200
_NATIVE = ("tritonserver", "other")


def record(
    spy: Path, endpoint: Endpoint, server: Server, prompts: Sequence[Prompt], target: Path
) -> dict[str, float]:
    """Record the share of 8 s that each process held its GIL, with 256 requests on `endpoint`.

    Its stacks are in a file of `target`, one a line, outermost first, and how often it was seen
    (`flamegraph.pl` takes that). A process that py-spy may not look into is left out.
    """
    target.mkdir(parents=True, exist_ok=True)
    found = {}
    with ThreadPoolExecutor() as threads, ExitStack() as stack:
        load = threads.submit(measure, endpoint, prompts, 512, 256, 256)
        sleep(3)  # the load's processes start, and the first prompts are read
        spies = []
        for pid, role in server.processes().items():
            if role not in _NATIVE:
                path = target / f"{endpoint.name.strip('/')}-{role}-{pid}.txt".replace(" ", "-")
                path.unlink(missing_ok=True)
                command = [spy, "record", f"--pid={pid}", f"--duration={_SECONDS}"]
                command += [f"--rate={_RATE}", "--gil", "--format=raw", f"--output={path}"]
                process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
                stack.callback(process.kill)
                spies.append((f"{role} {pid}", path, process))
        for name, path, process in spies:
            process.wait(_SECONDS + 60)
            if path.is_file():
                found[name] = round(_held(path) / (_SECONDS * _RATE), 3)
        load.result()
    return found


def _held(path: Path) -> int:
    return sum(int(line.rpartition(" ")[2]) for line in path.read_text("utf-8").splitlines())
