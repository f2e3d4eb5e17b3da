"""Engine protocol: what an engine process and its clients send each other, a kind byte first.

A client says what it wants and is welcomed; then it submits and cancels requests under handles of
its own. The engine answers with steps (`cog_triton.engines.step_items`), whatever the client; with
events of requests that are none of tokens; and reports to its owner the KV cache and the requests
of front ends, to front ends whether others have requests. Kinds that come a step or a request are
laid out here, the rest is `cog_triton.ipc.messages`.
"""

from __future__ import annotations

import json
import struct
from array import array
from dataclasses import dataclass
from typing import Any, Literal

from cog_triton.engines.step_items import EncodedStep
from cog_triton.ipc import messages
from cog_triton.ipc.framing import FrameError
from cog_triton.ipc.messages import message

Role = Literal["steps", "tokens", "owner"]
"""Of a client: ``steps`` gets them first, its requests always stream; an ``owner`` gets statistics,
too."""
ROLES: tuple[Role, ...] = ("steps", "tokens", "owner")

_STEP, _SUBMIT, _CANCEL, _EVENT, _OTHER = (bytes([kind]) for kind in range(5))
_SIZES = struct.Struct("<II")
_HANDLE = struct.Struct("<q")


@message
class Hello:
    """From a client, first: what it is."""

    role: Role


@message
class Welcome:
    """To a client, first: requests that the engine computes at once.

    An engine that takes the address of one that has died has a higher `generation`.
    """

    max_batch_size: int
    generation: int = 1


@message
class Others:
    """To a client that gets steps: whether requests of others run, before the engine has them."""

    run: bool


@message
class StepLoad:
    """To an owner: how many requests run of clients that get steps."""

    requests: int


@dataclass(frozen=True, slots=True)
class Submit:
    """From a client: a request, under a handle that it does not use otherwise.

    `content` is encoded still: `request` may raise the coded error of a value.
    """

    handle: int
    content: bytes

    def request(self) -> Any:
        """The request; raises FrameError for what this engine does not know."""
        return messages.decode(self.content)


@dataclass(frozen=True, slots=True)
class Cancel:
    """From a client: stop a request; its last item follows. Unknown handles are no error."""

    handle: int


@dataclass(frozen=True, slots=True)
class Event:
    """To a client: an event of a request whose answer is not tokens."""

    handle: int
    event: Any


def encode(sent: Any) -> bytes:
    """A message as the payload of a frame."""
    if isinstance(sent, EncodedStep):
        items, log_probs = sent.items.tobytes(), sent.log_probs.tobytes()
        texts = json.dumps(sent.errors).encode() if sent.errors else b""
        return b"".join([_STEP, _SIZES.pack(len(items), len(log_probs)), items, log_probs, texts])
    if isinstance(sent, Cancel):
        return _CANCEL + _HANDLE.pack(sent.handle)
    if isinstance(sent, Submit):
        return _SUBMIT + _HANDLE.pack(sent.handle) + sent.content
    if isinstance(sent, Event):
        return _EVENT + _HANDLE.pack(sent.handle) + messages.encode(sent.event)
    return _OTHER + messages.encode(sent)


def submit(handle: int, request: Any) -> bytes:
    """The payload that submits `request`."""
    return encode(Submit(handle, messages.encode(request)))


def decode(payload: bytes) -> Any:
    """The message of a payload; raises FrameError for what is none."""
    try:
        kind, at = payload[:1], 1 + _HANDLE.size
        if kind == _STEP:
            return _step(payload)
        if kind == _OTHER:
            return messages.decode(payload[1:])
        (handle,) = _HANDLE.unpack_from(payload, 1)
        if kind == _SUBMIT:
            return Submit(handle, payload[at:])
        if kind == _EVENT:
            return Event(handle, messages.decode(payload[at:]))
        if kind == _CANCEL:
            return Cancel(handle)
    except (ValueError, struct.error) as error:
        raise FrameError(f"a malformed message of {len(payload)} bytes: {error}") from error
    raise FrameError(f"a message of kind {kind!r}, which this version does not know")


def _step(payload: bytes) -> EncodedStep:
    of_items, of_log_probs = _SIZES.unpack_from(payload, 1)
    start = 1 + _SIZES.size
    middle = start + of_items
    end = middle + of_log_probs
    if end > len(payload):
        raise ValueError(f"a step of {end} bytes")
    items, log_probs = array("q", payload[start:middle]), array("f", payload[middle:end])
    return EncodedStep(items, log_probs, json.loads(payload[end:]) if end < len(payload) else [])
