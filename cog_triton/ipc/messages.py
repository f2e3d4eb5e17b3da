"""Messages between own processes: dataclasses as JSON under their names, with binary parts.

What has its default value is left out. Bytes and sequences of token ids follow the JSON as they
are. Annotations tell how a field is read; nothing that arrives is executed.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from types import UnionType
from typing import (
    Any,
    NamedTuple,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from cog_triton import errors
from cog_triton.ipc.framing import FrameError

T = TypeVar("T")

_HEAD = struct.Struct("!I")
_known: dict[str, type] = {}


@dataclass_transform(frozen_default=True)
def message(cls: type[T]) -> type[T]:
    """Register a class as a message, of its own name, and a frozen dataclass; a decorator."""
    if "__dataclass_fields__" not in vars(cls):
        cls = dataclasses.dataclass(frozen=True, slots=True)(cls)
    _known[cls.__name__] = cls
    return cls


def encode(sent: Any) -> bytes:
    """A message as the payload of a frame."""
    kind: Any = type(sent)
    return _payload(kind.__name__, _codec(kind), sent)


def decode(payload: bytes) -> Any:
    """The message of a payload; raises FrameError for what is none that this process knows.

    A value that its class refuses raises the class's own coded error.
    """

    def codec_of(name: str) -> _Codec:
        if name not in _known:
            raise FrameError(f"a message {name[:80]!r}, which this version does not know")
        return _codec(_known[name])

    return _value(payload, codec_of)


def encode_call(function: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    """A call of a module's function, its arguments as its annotations tell."""
    name = f"{function.__module__}:{function.__qualname__}"
    return _payload(name, _of_arguments(function), arguments)


def decode_call(payload: bytes | memoryview) -> tuple[Callable[..., Any], Sequence[Any]]:
    """The function and arguments of `encode_call`, from a process that may have anything run."""
    functions: list[Callable[..., Any]] = []

    def codec_of(name: str) -> _Codec:
        module, _, attribute = name.partition(":")
        functions.append(getattr(importlib.import_module(module), attribute))
        return _of_arguments(functions[0])

    arguments = _value(payload, codec_of)
    return functions[0], arguments


def encode_result(function: Callable[..., Any], result: Any) -> bytes:
    """What a function has returned, as its annotation tells."""
    return _payload("", _of_result(function), result)


def decode_result(function: Callable[..., Any], payload: bytes | memoryview) -> Any:
    """The result of `encode_result`; raises FrameError for what can be none."""
    return _value(payload, lambda _name: _of_result(function))


def _payload(name: str, codec: _Codec, value: Any) -> bytes:
    parts: list[bytes] = []
    text = json.dumps([name, codec.write(value, parts)], separators=(",", ":")).encode()
    return b"".join([_HEAD.pack(len(text)), text, *parts])


def _value(payload: bytes | memoryview, codec_of: Callable[[str], _Codec]) -> Any:
    try:
        (size,) = _HEAD.unpack_from(payload)
        name, values = json.loads(bytes(payload[_HEAD.size : _HEAD.size + size]))
        return codec_of(name).read(values, _Tail(payload, _HEAD.size + size))
    except (ValueError, TypeError, LookupError, AttributeError, struct.error) as error:
        raise FrameError(f"a malformed message: {type(error).__name__}: {error}"[:300]) from error


class _Tail:
    """The binary parts of a payload, taken in the order in which they were written."""

    def __init__(self, payload: bytes | memoryview, at: int) -> None:
        self._payload, self._at = payload, at

    def take(self, size: int) -> bytes:
        start, self._at = self._at, self._at + size
        if not start <= self._at <= len(self._payload):
            raise ValueError(f"a part of {size} bytes is missing")
        return bytes(self._payload[start : self._at])


class _Codec(NamedTuple):
    """How a value of one annotation becomes JSON, its parts appended; and how it is read."""

    write: Callable[[Any, list[bytes]], Any]
    read: Callable[[Any, _Tail], Any]


_AS_IT_IS = _Codec(lambda value, parts: value, lambda value, tail: value)


@cache
def _codec(hint: Any) -> _Codec:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _union([one for one in arguments if one is not type(None)])
    if hint is bytes:
        return _Codec(_written, lambda size, tail: tail.take(size))
    if origin is Sequence and arguments == (int,):
        return _Codec(
            lambda ids, parts: _written(array("q", ids).tobytes(), parts),
            lambda size, tail: array("q", tail.take(size)).tolist(),
        )
    if origin is tuple:
        return _tuple([one for one in arguments if one is not ...], many=... in arguments)
    if origin in (Mapping, dict) and arguments[0] is int:
        return _Codec(
            lambda value, parts: dict(value),
            lambda value, tail: {int(key): one for key, one in value.items()},
        )
    if origin is frozenset:
        return _Codec(lambda value, parts: sorted(value), lambda value, tail: frozenset(value))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _Codec(lambda value, parts: value.name, lambda name, tail: hint[name])
    if isinstance(hint, type) and issubclass(hint, errors.CogTritonError):
        return _Codec(
            lambda error, parts: str(error),
            lambda text, tail: errors.from_text(text) or errors.TritonUnknownError(text),
        )
    if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        return _record(hint)
    return _AS_IT_IS


@cache
def _of_arguments(function: Callable[..., Any]) -> _Codec:
    hints = get_type_hints(function)
    hints.pop("return", None)
    return _tuple(list(hints.values()), many=False) if hints else _AS_IT_IS


@cache
def _of_result(function: Callable[..., Any]) -> _Codec:
    return _codec(get_type_hints(function).get("return"))


def _written(content: bytes, parts: list[bytes]) -> int:
    parts.append(content)
    return len(content)


def _union(kinds: Sequence[Any]) -> _Codec:
    """What may be None, or an error beside its text."""
    codec = _codec(kinds[0])
    if str in kinds[1:]:  # an error whose text has no code
        codec = _Codec(
            lambda value, parts: str(value), lambda text, tail: errors.from_text(text) or text
        )
    return _Codec(
        lambda value, parts: None if value is None else codec.write(value, parts),
        lambda value, tail: None if value is None else codec.read(value, tail),
    )


def _tuple(kinds: Sequence[Any], *, many: bool) -> _Codec:
    codecs = [_codec(kind) for kind in kinds]

    def of(values: Sequence[Any]) -> Sequence[_Codec]:
        return codecs * len(values) if many else codecs

    def write(values: Sequence[Any], parts: list[bytes]) -> Any:
        return [one.write(value, parts) for one, value in zip(of(values), values, strict=True)]

    def read(values: Sequence[Any], tail: _Tail) -> Any:
        return tuple(one.read(value, tail) for one, value in zip(of(values), values, strict=True))

    return _Codec(write, read)


def _record(cls: Any) -> _Codec:
    """A dataclass or a named tuple, by the names of its fields."""
    hints, defaults = get_type_hints(cls), _defaults(cls)
    codecs = {name: _codec(hints[name]) for name in defaults}

    def write(value: Any, parts: list[bytes]) -> Any:
        values: dict[str, Any] = {}
        for name, default in defaults.items():
            one = getattr(value, name)
            if default is dataclasses.MISSING or one != default:
                values[name] = codecs[name].write(one, parts)
        return values

    def read(values: Mapping[str, Any], tail: _Tail) -> Any:
        return cls(**{name: codecs[name].read(one, tail) for name, one in values.items()})

    return _Codec(write, read)


def _defaults(cls: Any) -> Mapping[str, Any]:
    """Names of the fields, with what a field is that is left out."""
    if not dataclasses.is_dataclass(cls):
        return {name: cls._field_defaults.get(name, dataclasses.MISSING) for name in cls._fields}
    return {
        one.name: one.default
        if one.default_factory is dataclasses.MISSING
        else one.default_factory()
        for one in dataclasses.fields(cls)
    }
