"""Where a server's Python processes spend their time under load, as py-spy sees it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import sleep

from load import measure
from prompts import Prompt
from servers import Server
from ways import Way

_SECONDS = 8
_RATE = 200
_NATIVE = ("tritonserver", "other")


def record(
    spy: Path, way: Way, server: Server, prompts: Sequence[Prompt], target: Path
) -> dict[str, float]:
    """The share of 8 s in which each process held its GIL while 256 requests ran on `way`.

    Its stacks are in a file of `target`, one a line, outermost first, and how often it was seen
    (`flamegraph.pl` takes that). A process that py-spy may not look into is left out.
    """
    target.mkdir(parents=True, exist_ok=True)
    found = {}
    with ThreadPoolExecutor() as threads, ExitStack() as stack:
        load = threads.submit(measure, way, prompts, 512, 256, 256)
        sleep(3)  # the load's processes start, and the first prompts are read
        spies = []
        for pid, role in server.processes().items():
            if role not in _NATIVE:
                path = target / f"{way.name.strip('/')}-{role}-{pid}.txt".replace(" ", "-")
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
