"""Scripts of a tree, each in a fork of one process that has imported TensorRT-LLM.

``python conversions.py`` in the Python of an installation reads a JSON list of runs on stdin,
objects with ``script``, ``args`` and ``log``, and writes a list of exit codes on stdout. The
import takes seconds, a small model's conversion tenths of one.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def in_fork(action: Callable[[], None], log: Path) -> int:
    """Do `action` in a fork with all output in `log`; its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with log.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    status = 0
    try:
        action()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 -- whatever a script of others raises
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run(script: str, args: list[str]) -> None:
    """Run `script` as the command line would."""
    sys.argv = [script, *args]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    runs: list[dict[str, Any]] = json.load(sys.stdin)
    answer, sys.stdout = sys.stdout, sys.stderr
    import tensorrt_llm.commands.build  # noqa: F401 -- and with it all else

    sys.stdout.flush()

    def status_of(each: dict[str, Any]) -> int:
        return in_fork(lambda: run(each["script"], each["args"]), Path(each["log"]))

    json.dump([status_of(each) for each in runs], answer)


if __name__ == "__main__":
    main()
