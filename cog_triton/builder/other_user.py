"""Another user for a proof: an engine that starts for its builder alone is found out in time."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

NOBODY = 65534
_TIMEOUT_S = 60
# It starts itself, too: root may pass on what nobody may not find again.
_PROBE = """
import subprocess, sys
import cog_triton
subprocess.run([sys.executable, "-c", ""], check=True)
[open(path).close() for path in sys.argv[1:]]
"""


def command(
    python: str, environment: dict[str, str], files: Sequence[Path], writable: Path
) -> tuple[str, ...]:
    """Command that begins a command line to be run by nobody, to whom `writable` is given.

    Empty where this user may not become another one, or where that one can neither run `python`
    with this package nor read `files`.
    """
    program = shutil.which("setpriv")
    if os.geteuid() != 0 or program is None:
        return ()
    ids = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    begin = (program, *ids, "--")
    try:
        subprocess.run(
            [*begin, python, "-c", _PROBE, *map(str, files)],
            env=environment,
            cwd=writable.parent,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    writable.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chown(writable, NOBODY, NOBODY)
    return begin
