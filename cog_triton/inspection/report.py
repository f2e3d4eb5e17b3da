"""Inspection report: the facts of an engine or a model as a table for 80 columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cog_triton.artifact.engine_manifest import MANIFEST_NAME
from cog_triton.artifact.seal import seal_of
from cog_triton.inspection.description import Description
from cog_triton.system.printable import printable

_MOST = 16
_NOT_SHOWN = ("files", "size", "whole", "manifest", "gpu_check")


def as_table(engine: Description, facts: Mapping[str, Any]) -> RenderableType:
    """Its `facts`, a row for each file, and the result of the checksums."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if name not in _NOT_SHOWN and (text := _shown(value)):
            table.add_row(name, _text(text))
    if check := facts.get("gpu_check"):
        table.add_row("this machine", _text(check["problem"] or "fits"))
    return Group(table, _files(engine, facts["size"]), Text(_verdict(engine)))


def _shown(value: Any) -> str:
    """A value as text; empty for what is not recorded."""
    if isinstance(value, dict):
        if len(value) > _MOST:
            return f"{len(value)} entries"
        texts = ((key, one, _shown(one)) for key, one in value.items())
        found = (f"{k} ({t})" if isinstance(one, dict) else f"{k} {t}" for k, one, t in texts if t)
        return ", ".join(found)
    if isinstance(value, list):
        return ", ".join(map(_shown, value[:_MOST]))
    return "" if value is None else str(value)


def _files(engine: Description, size: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
    table.add_column("file", f"{len(engine.files)} files", overflow="fold", ratio=1)
    table.add_column("MB", _mb(size), justify="right", no_wrap=True)
    table.add_column("sha256", no_wrap=True)
    table.add_column("checked", no_wrap=True)
    seals: dict[str, list[str]] = {}
    for name, file in engine.files.items():
        if (owner := seal_of(name)) is not None:
            seals.setdefault(owner, []).append(name)
            continue
        checked = "ok" if engine.verified(name) else "-"
        table.add_row(_text(name), _mb(file.size), (file.sha256 or "-")[:12], checked)
    for owner, names in seals.items():
        total = sum(engine.files[name].size for name in names)
        checked = "ok" if all(map(engine.verified, names)) else "-"
        table.add_row(_text(f"sealed/{owner}: {len(names)} files"), _mb(total), "", checked)
    return table


def _verdict(engine: Description) -> str:
    verified = sum(map(engine.verified, engine.files))
    others = len(engine.files) - verified - 1
    if engine.engine is None:
        return "A model has no manifest to compare its files with."
    if not engine.source.whole:
        return "Only the beginning of the tar was read: its files are compared when it is served."
    if engine.manifest is None:
        return f"No {MANIFEST_NAME}: its GPU is not recorded, and there are no checksums."
    if engine.source.kind == "registry":
        return (
            f"{others} files were not fetched: sizes and sha256 are what {MANIFEST_NAME} says, and"
            " are compared with the files when the engine is pulled."
        )
    extra = f" Not named there: {others}." if others > 0 else ""
    return f"All {verified} files are as {MANIFEST_NAME} says, by size and sha256.{extra}"


def _text(value: str) -> Text:
    """Escape control characters: names from an engine must not control the terminal."""
    return Text(printable(value), overflow="fold")


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f}"
