"""What the load generator's processes say to each other: pickles with their length before."""

from __future__ import annotations

import asyncio
import pickle
import struct
from dataclasses import dataclass
from typing import Any

from cog_triton.bench.load_generator import Progress
from cog_triton.bench.options import Options
from cog_triton.bench.request_record import Record
from cog_triton.bench.self_monitor import Load
from cog_triton.errors import CogTritonError

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Task:
    """What one process does."""

    options: Options
    part: int
    parts: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Everything is prepared; the parent answers with when to begin."""


@dataclass(frozen=True, slots=True)
class Start:
    """When to begin, by the monotonic clock."""

    at: float


@dataclass(frozen=True, slots=True)
class Stop:
    """End now, with what there is."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one process did."""

    records: list[Record]
    load: Load
    notes: list[str]


Frame = Task | Ready | Start | Stop | Progress | Result | CogTritonError


def encode(frame: Frame) -> bytes:
    """The bytes of a frame."""
    data = pickle.dumps(frame)
    return _LENGTH.pack(len(data)) + data


async def read(reader: asyncio.StreamReader) -> Any:
    """The next frame; raises IncompleteReadError when there are no more."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))
