"""Engine protocol: what an engine process and its clients send each other, a kind byte first.

A client says what it wants and is welcomed; then it submits and cancels requests under handles of
its own. The engine answers with steps (`cog_triton.engines.step_items`), whatever the client; with
events of requests that are none of tokens; and reports to its owner the KV cache and the requests
of front ends, to front ends whether others have requests. Kinds that come a step or a request are
laid out here, the rest is a name and fields as JSON; a prompt's ids and files follow it.

Clients run in Triton's stubs, too, which have only the standard library: messages to them are
flat. The engine checks types.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from io import BytesIO
from typing import Any, Literal

from cog_triton import errors
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.mock.mock_request import MockRequest
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import EncodedStep
from cog_triton.engines.vllm.host_messages import TextEvent, TextRequest
from cog_triton.ipc.framing import LENGTH, FrameError

Role = Literal["steps", "tokens", "owner"]
"""Of a client: ``steps`` gets them first, its requests always stream; an ``owner`` gets statistics,
too."""
ROLES: tuple[Role, ...] = ("steps", "tokens", "owner")

_STEP, _SUBMIT, _CANCEL, _EVENT, _OTHER = (bytes([kind]) for kind in range(5))
_SIZES = struct.Struct("<II")
_HANDLE = struct.Struct("<q")
_MALFORMED = (
    *(ValueError, TypeError, LookupError, AttributeError, struct.error),
    *(ArithmeticError, RecursionError),
)


@dataclass(frozen=True, slots=True)
class Hello:
    """From a client, first: what it is."""

    role: Role


@dataclass(frozen=True, slots=True)
class Welcome:
    """To a client, first: requests that the engine computes at once.

    An engine that takes the address of one that has died has a higher `generation`.
    """

    max_batch_size: int
    generation: int = 1


@dataclass(frozen=True, slots=True)
class Others:
    """To a client that gets steps: whether requests of others run, before the engine has them."""

    run: bool


@dataclass(frozen=True, slots=True)
class StepLoad:
    """To an owner: how many requests run of clients that get steps, and of other stubs."""

    requests: int
    others: int = 0


@dataclass(frozen=True, slots=True)
class Submit:
    """From a client: a request, under a handle that it does not use otherwise.

    `content` is encoded still: `request` may raise the coded error of a value.
    """

    handle: int
    content: bytes

    def request(self) -> Any:
        """The request; raises FrameError for what this engine does not know."""
        import msgspec  # engines have it, stubs do not

        try:
            content = BytesIO(self.content)
            (size,) = LENGTH.unpack(content.read(LENGTH.size))
            name, values = msgspec.json.decode(content.read(size))
            if "input_ids" in values:
                values["input_ids"] = array("q", content.read(values["input_ids"])).tolist()
            for image in values.get("images", ()):
                image["data"] = content.read(image["data"])
            return msgspec.convert(values, _kind(REQUESTS, name), str_keys=True)
        except _MALFORMED as error:
            raise FrameError(f"a malformed message: {error}"[:300]) from error


@dataclass(frozen=True, slots=True)
class Cancel:
    """From a client: stop a request; its last item follows. Unknown handles are no error."""

    handle: int


@dataclass(frozen=True, slots=True)
class Event:
    """To a client: an event of a request whose answer is not tokens."""

    handle: int
    event: Any


REQUESTS = (EngineRequest, MockRequest, TextRequest)
OTHERS = (Hello, Welcome, Others, StepLoad, KVCacheStats, TextEvent)
"""Messages and events of flat fields."""


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
        return _EVENT + _HANDLE.pack(sent.handle) + _text(sent.event, [])
    return _OTHER + _text(sent, [])


def submit(handle: int, request: Any) -> bytes:
    """The payload that submits `request`."""
    parts: list[bytes] = []
    text = _text(request, parts)
    return encode(Submit(handle, b"".join([LENGTH.pack(len(text)), text, *parts])))


def decode(payload: bytes) -> Any:
    """The message of a payload; raises FrameError for what is none."""
    try:
        kind, at = payload[:1], 1 + _HANDLE.size
        if kind == _STEP:
            return _step(payload)
        if kind == _OTHER:
            return _flat(payload[1:])
        (handle,) = _HANDLE.unpack_from(payload, 1)
        if kind == _SUBMIT:
            return Submit(handle, payload[at:])
        if kind == _EVENT:
            return Event(handle, _flat(payload[at:]))
        if kind == _CANCEL:
            return Cancel(handle)
    except _MALFORMED as error:
        raise FrameError(f"a malformed message of {len(payload)} bytes: {error}") from error
    raise FrameError(f"a message of kind {kind!r}, which this version does not know")


def engine_gone() -> errors.TritonUnavailable:
    """The error of requests that a dead engine leaves behind."""
    return errors.TritonUnavailable("the engine's process has ended; try again later")


def _step(payload: bytes) -> EncodedStep:
    of_items, of_log_probs = _SIZES.unpack_from(payload, 1)
    start = 1 + _SIZES.size
    middle = start + of_items
    end = middle + of_log_probs
    if end > len(payload):
        raise ValueError(f"a step of {end} bytes")
    items, log_probs = array("q", payload[start:middle]), array("f", payload[middle:end])
    return EncodedStep(items, log_probs, json.loads(payload[end:]) if end < len(payload) else [])


def _flat(text: bytes) -> Any:
    name, values = json.loads(text)
    if (error := values.get("error")) is not None:
        values["error"] = errors.from_text(error) or errors.TritonUnknownError(error)
    return _kind(OTHERS, name)(**values)


def _kind(known: Sequence[type], name: str) -> type:
    for kind in known:
        if kind.__name__ == name:
            return kind
    raise FrameError(f"a message {name!r:.80}, which this version does not know")


def _text(sent: Any, parts: list[bytes]) -> bytes:
    return json.dumps([type(sent).__name__, sent], default=partial(_plain, parts)).encode()


def _plain(parts: list[bytes], value: Any) -> Any:
    """The fields of a dataclass that differ from their defaults; the size of a part."""
    if isinstance(value, errors.CogTritonError):
        return str(value)
    if isinstance(value, bytes):
        parts.append(value)
        return len(value)
    found = {}
    for item in fields(value):
        one = getattr(value, item.name)
        if one != item.default:
            found[item.name] = array("q", one).tobytes() if item.name == "input_ids" else one
    return found
