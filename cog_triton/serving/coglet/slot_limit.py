"""Workaround: a limit on COG_MAX_CONCURRENCY, below the blocking threads of coglet's worker.

Delete when coglet streams without a thread for each prediction. coglet 0.23.1 keeps a thread of
tokio's pool in each prediction until it ends (block_in_place), waiting ones included. The pool has
512, which no option changes, and the worker's control channel uses one for each read and write.
With 512 predictions at once, health checks, cancellations and freed slots wait until one ends, and
the server is taken for dead; with 511 they do not.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping

MAX_SLOTS = 500
"""Predictions at once that leave threads for everything else."""
_NAME = "COG_MAX_CONCURRENCY"

_log = logging.getLogger(__name__)


def limit_slots(environment: MutableMapping[str, str]) -> None:
    """Cut COG_MAX_CONCURRENCY in `environment` to `MAX_SLOTS`, with a warning in the log."""
    asked = environment.get(_NAME, "")
    if asked.isdecimal() and int(asked) > MAX_SLOTS:
        _log.warning(
            "%s=%s: Cog's worker has threads for %d predictions at once, so that is the limit;"
            " more can run at once over OPENAI_PORT",
            _NAME,
            asked,
            MAX_SLOTS,
        )
        environment[_NAME] = str(MAX_SLOTS)
