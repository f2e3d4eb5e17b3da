"""Cog 0.23.1's HTTP server: how it is started, and its directory of predictions.

Workarounds, each to be deleted when coglet has what it says:

- `MAX_SLOTS`: a thread of tokio's pool for each prediction until it ends (block_in_place). The pool
  has 512, and the worker's control channel needs some: with 512 predictions nothing is answered.
- TOKIO_WORKER_THREADS: of two threads that look for a slot at once, one finds coglet's list locked
  and answers 409 with slots free (PermitPool::try_acquire does not wait).
- KUBERNETES_SERVICE_HOST: with it every answer of READY writes /var/run/cog/ready, and each failure
  to do so is a warning.
- `PLACE`: a literal of coglet, which makes three directories a prediction there and leaves them.
"""

from __future__ import annotations

import logging
import os
import pwd
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from cog_triton.errors import TritonStartFailed
from cog_triton.system.log_format import STDERR

MAX_SLOTS = 500
"""Predictions at once that leave threads for everything else."""
PLACE = Path("/tmp/coglet")
_STALE_S = 3600.0
_READY_FILE = Path("/var/run/cog")
_log = logging.getLogger(__name__)


def command(arguments: Sequence[str]) -> list[str]:
    """The command of a Cog server on 127.0.0.1, with more arguments of cog.server.http."""
    return [sys.executable, "-m", "cog.server.http", *arguments, "--host", "127.0.0.1"]


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a Cog server but for PORT, with a warning for what it cannot have.

    No proxy is asked for 127.0.0.1, where coglet posts webhooks.
    """
    direct = base.get("no_proxy") or base.get("NO_PROXY") or ""
    if "*" not in direct.split(","):
        direct = f"{direct},127.0.0.1".lstrip(",")
    made = {**base, "TOKIO_WORKER_THREADS": "1", "COG_HOST": "127.0.0.1"}
    made |= {"no_proxy": direct, "NO_PROXY": direct}
    if (asked := base.get("TOKIO_WORKER_THREADS", "1")) != "1":
        _log.warning(
            f"TOKIO_WORKER_THREADS={asked}: Cog refuses some with slots free then; it has 1"
        )
    slots = base.get("COG_MAX_CONCURRENCY", "")
    if slots.isdecimal() and int(slots) > MAX_SLOTS:
        _log.warning(
            f"COG_MAX_CONCURRENCY={slots}: Cog's worker has threads for {MAX_SLOTS} predictions at"
            " once, so that is the limit; more can run at once over OPENAI_PORT"
        )
        made["COG_MAX_CONCURRENCY"] = str(MAX_SLOTS)
    if not os.isatty(STDERR) or base.get("TERM", "dumb") == "dumb":
        made.setdefault("NO_COLOR", "1")
    if "KUBERNETES_SERVICE_HOST" in base and (reason := _unwritable(_READY_FILE)):
        del made["KUBERNETES_SERVICE_HOST"]
        _log.info("Cog writes no readiness file: %s; /health-check has the state", reason)
    return made


def _unwritable(directory: Path) -> str | None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{directory}: {error.strerror}"
    if os.access(directory, os.W_OK | os.X_OK):
        return None
    return f"{directory} belongs to another user"


def take_place() -> None:
    """Make `PLACE` for this user's predictions; raises E2106 if another user has it.

    What a server that was killed left there is removed.
    """
    with suppress(OSError):
        PLACE.mkdir(mode=0o700)
    for path in (PLACE, PLACE / "predictions"):
        try:
            found = path.lstat()
        except OSError as error:
            if path != PLACE and isinstance(error, FileNotFoundError):
                continue
            raise _refused(f"{path}: {error.strerror}") from None
        if not stat.S_ISDIR(found.st_mode):
            raise _refused(f"{path} is no directory")
        if found.st_uid != os.geteuid():
            raise _refused(f"{path} belongs to the user {_name(found.st_uid)}")
        if not os.access(path, os.W_OK | os.X_OK):
            raise _refused(f"{path} cannot be written")
    with suppress(OSError):
        for path in (PLACE / "predictions").iterdir():
            if path.lstat().st_mtime <= time.time() - _STALE_S:
                remove(path.name)


def _refused(reason: str) -> TritonStartFailed:
    return TritonStartFailed(
        f"{reason}, so Cog does not start, which writes there for each prediction: have its owner"
        " stop their server and remove it, run this one as that user, or in a container with a"
        " writable /tmp"
    )


def _name(user: int) -> str:
    try:
        return f"{pwd.getpwuid(user).pw_name} ({user})"
    except KeyError:
        return str(user)


def remove(prediction_id: str) -> None:
    """Remove the directories of a prediction that has ended."""
    if prediction_id not in ("", ".", "..") and "/" not in prediction_id:
        directory = PLACE / "predictions" / prediction_id
        for path in (directory / "inputs", directory / "outputs", directory):
            with suppress(OSError):
                path.rmdir()


def leave_place() -> None:
    """Remove this user's `PLACE` if no prediction has anything there: another user can have it."""
    for path in (PLACE / "predictions", PLACE):
        with suppress(OSError):
            if path.lstat().st_uid == os.geteuid():
                path.rmdir()
