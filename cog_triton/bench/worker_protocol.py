"""Messages between the reporting process and its workers: length-prefixed pickles."""

from __future__ import annotations

import asyncio
import pickle
import struct
from dataclasses import dataclass
from typing import Any

from cog_triton.bench.generator_usage import GeneratorUsage
from cog_triton.bench.load_generator import Progress
from cog_triton.bench.options import Options
from cog_triton.bench.request_record import Record
from cog_triton.errors import CogTritonError

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Task:
    """Work of one process."""

    options: Options
    part: int
    parts: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Prepared; the parent answers with `Start`."""


@dataclass(frozen=True, slots=True)
class Start:
    """Time to start, of the monotonic clock."""

    at: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop, and send the records there are."""


@dataclass(frozen=True, slots=True)
class Result:
    """Records of one process."""

    records: list[Record]
    usage: GeneratorUsage
    notes: list[str]


Message = Task | Ready | Start | Stop | Progress | Result | CogTritonError


def encode(message: Message) -> bytes:
    """Encode a message."""
    data = pickle.dumps(message)
    return _LENGTH.pack(len(data)) + data


async def read(reader: asyncio.StreamReader) -> Any:
    """Read the next message; raises IncompleteReadError at the end."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))
