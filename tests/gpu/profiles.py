"""Where a server's Python processes spend their time under load, as py-spy sees it."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from load import measure
from prompts import Prompt
from servers import Server
from ways import Way

_SECONDS = 8
_NATIVE = ("tritonserver", "other")


def record(
    spy: Path, way: Way, server: Server, prompts: Sequence[Prompt], target: Path
) -> list[str]:
    """Stacks that hold the GIL while 256 requests run on `way`, a file for each process.

    A line of a file is a stack, outermost first, and how often it was seen (`flamegraph.pl` takes
    that). Returns the files' names.
    """
    target.mkdir(parents=True, exist_ok=True)
    load = threading.Thread(target=measure, args=(way, prompts, 512, 256, 256))
    load.start()
    time.sleep(3)  # the load's processes start, and the first prompts are read
    spies, files = [], []
    for pid, role in server.processes().items():
        if role not in _NATIVE:
            name = f"{way.name.strip('/')}-{role}-{pid}.txt".replace(" ", "-")
            command = [spy, "record", f"--pid={pid}", f"--duration={_SECONDS}", "--rate=200"]
            command += ["--gil", "--format=raw", f"--output={target / name}"]
            spies.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            files.append(name)
    for each in spies:
        each.wait(_SECONDS + 60)
    load.join()
    return [name for name in files if (target / name).is_file()]
