"""Cause of a failed step: the lines of its output that say why, without the trace before them."""

from __future__ import annotations

import re
from collections.abc import Sequence

_TRACE = "Traceback (most recent call last):"
# What argparse, and many a command, write after their usage.
_REFUSAL = re.compile(r"[\w./-]+: error: ")
_MOST_LINES = 5


def cause(lines: Sequence[str]) -> list[str]:
    """The last lines that name the cause of a failure: an exception, a refusal, or all there is.

    All of the output was echoed as it came and is in the step's log, so it is not said again.

    Args:
        lines: the last lines of the step's output, as `OutputStream.last`.
    """
    told = [line for line in lines if line.strip()]
    for index, line in reversed(list(enumerate(told))):
        if _REFUSAL.match(line):
            return told[index : index + _MOST_LINES]
        if line.rstrip().endswith(_TRACE):
            # The frames are indented below it, and the exception is not.
            margin = line[: line.index(_TRACE)]
            after = [text.removeprefix(margin) for text in told[index + 1 :]]
            raised = next((n for n, text in enumerate(after) if not text[:1].isspace()), None)
            if raised is not None:
                return after[raised:][:_MOST_LINES]
    return told[-_MOST_LINES:]
