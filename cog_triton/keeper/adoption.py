"""Adoption of a keeper that outlives servers: one that has the engine wanted, else a new one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cog_triton.keeper.lot_messages import Adopt, Adopted
from cog_triton.keeper.parked_record import differences, read_record
from cog_triton.keeper.parking_lot import ParkingLot, socket_name
from cog_triton.system import local_socket, message_stream
from cog_triton.system.detached import DetachedProgram

_log = logging.getLogger(__name__)
_ANSWER_S = 5.0
_REAPED = "COG_TRITON_REAPED_"  # marks of the server's reapers, which kill who bears them
_PRIVATE = ("COG_TRITON_PARKING", "COG_TRITON_DRAIN_FILE")


@dataclass(frozen=True, slots=True)
class ParkingPlace:
    """Place of a server in its parking lot.

    Attributes:
        work_dir: work directory that has the lot.
        name: keeper that was started for this server, and the server's name in the lot.
        model: what people call the engine.
        identity: what an engine must be to stand in for the one that is wanted.
    """

    work_dir: Path
    name: str
    model: str
    identity: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class AdoptedKeeper:
    """A keeper that this server has, as long as it does not hang up."""

    name: str
    directory: Path
    program: DetachedProgram
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


async def adopt(
    place: ParkingPlace, environment: Mapping[str, str], *, spare: bool
) -> AdoptedKeeper | None:
    """Adopt a keeper for engines with `environment`; None where not even the new one answers.

    Why an engine that is parked is not taken over is logged.
    """
    lot = ParkingLot(place.work_dir)
    kept = {k: v for k, v in environment.items() if not k.startswith(_REAPED) and k not in _PRIVATE}
    order = Adopt(place.name, place.model, place.identity, spare, kept)
    for entry in await asyncio.to_thread(lambda: list(lot.entries())):
        if entry.name == place.name or (identity := read_record(entry.directory)) is None:
            continue
        if unlike := differences(identity, place.identity):
            _log.info("the engine parked as %s is another one: %s", entry.name, unlike)
            continue
        if found := await _adopt(entry.name, entry.directory, order):
            _log.info("the engine parked as %s is taken over", entry.name)
            return found
    return await _adopt(place.name, lot.directory / place.name, order)


async def _adopt(name: str, directory: Path, order: Adopt) -> AdoptedKeeper | None:
    try:
        reader, writer = await asyncio.open_unix_connection(local_socket.address(socket_name(name)))
    except OSError:
        return None
    with suppress(OSError, EOFError, ValueError, asyncio.TimeoutError):
        own = writer.get_extra_info("socket")
        if local_socket.is_same_user(own):
            message_stream.send(writer, order)
            answer = await asyncio.wait_for(message_stream.receive(reader), _ANSWER_S)
            if isinstance(answer, Adopted) and not answer.refused:
                program = DetachedProgram(answer.root)
                return AdoptedKeeper(socket_name(name), directory, program, reader, writer)
            if isinstance(answer, Adopted):
                _log.info("the engine parked as %s is not to be had: %s", name, answer.refused)
    writer.close()
    return None
