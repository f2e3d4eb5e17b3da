"""Orders of Cog's worker to the server, over its Unix socket.

A connection carries one order. The server answers with frames: a byte for the kind, then text in
UTF-8. It hangs up after the last one. A peer that hangs up first cancels its prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cog_triton.ipc.messages import Message

ADDRESS_VARIABLE = "COG_TRITON_SERVER_ADDRESS"
"""Name of the server's socket: 128 random bits of this start. One prediction has it as its id: the
server's own, at the start."""
OUTPUT, LOG, METRICS, ERROR, CANCELLED, END = (b"%c" % kind for kind in b"olmec.")
"""Kinds of frames: METRICS are a JSON object, an ERROR begins with its code."""


class SetUp(Message, frozen=True):
    """Send log lines of the start as they come, then END if the server is ready, or an ERROR."""


class CheckHealth(Message, frozen=True):
    """Send END if requests are served, or the ERROR why they are not."""


class Predict(Message, frozen=True):
    """Run a prediction of Cog's `id`; `inputs` are those of the `mock` server or the runner's."""

    id: str
    inputs: Mapping[str, Any]
    mock: bool = False


Order = SetUp | CheckHealth | Predict
