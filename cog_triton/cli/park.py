"""``cog-triton park``: engines that have outlived their server, listed and ended."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from cog_triton.system.printable import printable
from cog_triton.system.terminal import coded_errors, escape, out

if TYPE_CHECKING:
    from cog_triton.keeper.lot_messages import Description
    from cog_triton.keeper.parking_lot import LotEntry


def park(
    action: Annotated[
        Literal["list", "drop"],
        typer.Argument(help="list: show them. drop: end one, or all."),
    ] = "list",
    name: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="With drop: the engine to end.")
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="With drop: end all that no server has.")
    ] = False,
) -> None:
    """Show or end the engines that `cog-triton serve --park` has left for its next start.

    One that is parked holds host memory and a few MiB of the GPU, and stays until it is taken over,
    dropped, or the machine ends. They are those of this user and work directory
    (COG_TRITON_WORK_DIR).

    Example: cog-triton park list

    Example: cog-triton park drop 4f0c91aa

    Example: cog-triton park drop --all
    """
    from cog_triton.errors import InvalidArgument
    from cog_triton.keeper.parking_lot import ParkingLot
    from cog_triton.settings import load_settings

    with coded_errors():
        lot = ParkingLot(load_settings().work_dir)
        entries = [one for one in lot.entries() if _state(one) != "idle"]
        if action == "list":
            if name or all_:
                raise InvalidArgument("ID and --all: go with `cog-triton park drop`")
            _show(entries)
            return
        if bool(name) == all_:
            raise InvalidArgument("park drop: give either an ID of `cog-triton park list` or --all")
        chosen = [one for one in entries if one.name == name or (all_ and _state(one) != "serving")]
        if name and not chosen:
            known = ", ".join(one.name for one in entries) or "none"
            raise InvalidArgument(f"ID={name!r}: no engine is parked by this name; known: {known}")
        for entry in chosen:
            lot.drop(entry)
            out.print(f"{entry.name} has ended")
        if not chosen:
            out.print("No engine is parked")


def _show(entries: list[LotEntry]) -> None:
    if not entries:
        out.print("No engine is parked")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("ID", "MODEL", "STATE", "SINCE", "HOST MEMORY", "GPUS", "PID"):
        table.add_column(column, no_wrap=True)
    for entry in entries:
        table.add_row(entry.name, *_row(entry.description))
    out.print(table)


def _row(held: Description | None) -> tuple[str, ...]:
    if held is None:
        return ("?", "silent", "", "", "", "")
    since = timedelta(seconds=round(time.time() - held.since)) if held.since else ""
    model = escape(printable(held.model))
    return (
        model,
        held.state,
        str(since),
        held.host_memory,
        held.gpus or "none",
        str(held.pid or ""),
    )


def _state(entry: LotEntry) -> str:
    return entry.description.state if entry.description else ""
