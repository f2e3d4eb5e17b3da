"""Workaround: no readiness file of coglet 0.23.1 where it cannot be written.

Delete when coglet logs the failure once. On Kubernetes, which it tells by a variable, every answer
of READY writes /var/run/cog/ready; under a read-only root, or another user, each logs a warning.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from pathlib import Path

_VARIABLE = "KUBERNETES_SERVICE_HOST"
_DIRECTORY = Path("/var/run/cog")

_log = logging.getLogger(__name__)


def require_writable(environment: MutableMapping[str, str], directory: Path = _DIRECTORY) -> None:
    """Remove the variable from `environment`, with a note, unless `directory` can be written."""
    if _VARIABLE not in environment:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if os.access(directory, os.W_OK | os.X_OK):
            return
        reason = "it belongs to another user"
    except OSError as error:
        reason = str(error.strerror)
    del environment[_VARIABLE]
    _log.info("Cog writes no readiness file in %s: %s; /health-check tells it", directory, reason)
