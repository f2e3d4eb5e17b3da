"""Workarounds in the environment of Cog 0.23.1's server: slots, threads, colours, readiness file.

Delete when coglet streams without a thread for each prediction, and, for the file, when it logs
the failure once. coglet keeps a thread of tokio's pool in each prediction until it ends
(block_in_place), waiting ones included. The pool has 512, which no option changes, and the worker's
control channel uses one for each read and write. With 512 predictions at once, health checks,
cancellations and freed slots wait until one ends, and the server is taken for dead; with 511 they
do not.

Of two threads of the server that look for a slot at once, one finds coglet's list locked and
answers 409, with slots free: it has one thread. Delete when PermitPool::try_acquire waits.

On Kubernetes, which it tells by a variable, every answer of READY writes /var/run/cog/ready; under
a read-only root, or another user, each logs a warning.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from pathlib import Path

from cog_triton.system.log_format import STDERR

MAX_SLOTS = 500
"""Predictions at once that leave threads for everything else."""
_SLOTS = "COG_MAX_CONCURRENCY"
_THREADS = "TOKIO_WORKER_THREADS"
_KUBERNETES = "KUBERNETES_SERVICE_HOST"
_DIRECTORY = Path("/var/run/cog")

_log = logging.getLogger(__name__)


def limit_slots(environment: MutableMapping[str, str]) -> None:
    """Cut COG_MAX_CONCURRENCY in `environment` to `MAX_SLOTS`, with a warning in the log."""
    asked = environment.get(_SLOTS, "")
    if asked.isdecimal() and int(asked) > MAX_SLOTS:
        _log.warning(
            f"{_SLOTS}={asked}: Cog's worker has threads for {MAX_SLOTS} predictions at once, so"
            " that is the limit; more can run at once over OPENAI_PORT"
        )
        environment[_SLOTS] = str(MAX_SLOTS)


def limit_threads(environment: MutableMapping[str, str]) -> None:
    """Have Cog's server look for slots by one thread, with a warning if `environment` asks else."""
    if (asked := environment.get(_THREADS)) not in (None, "1"):
        _log.warning(f"{_THREADS}={asked}: Cog refuses some with slots free then; it has 1")
    environment[_THREADS] = "1"


def limit_colours(environment: MutableMapping[str, str]) -> None:
    """Have Cog's log in colours only on a terminal that shows them."""
    if not os.isatty(STDERR) or environment.get("TERM", "dumb") == "dumb":
        environment.setdefault("NO_COLOR", "1")


def require_writable(environment: MutableMapping[str, str], directory: Path = _DIRECTORY) -> None:
    """Remove the variable from `environment`, with a note, unless `directory` can be written."""
    if _KUBERNETES not in environment:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if os.access(directory, os.W_OK | os.X_OK):
            return
        reason = "it belongs to another user"
    except OSError as error:
        reason = str(error.strerror)
    del environment[_KUBERNETES]
    _log.info("Cog writes no readiness file in %s: %s; /health-check tells it", directory, reason)
