"""Prune report, as a table of 80 columns and as JSON."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cog_triton_prune.command import Result
from cog_triton_prune.gpu_arch import sm_text
from cog_triton_prune.prune_file import Outcome, shown


def as_json(result: Result) -> str:
    """JSON with all results, sizes in bytes."""
    options = result.options
    rows = [
        {
            "path": str(outcome.path),
            "action": outcome.action,
            "reason": outcome.reason,
            "size": outcome.size,
            "found": outcome.plan.found,
            "kept": outcome.plan.kept,
            "freed": outcome.plan.freed if outcome.action == "pruned" else 0,
            "fat_binaries": outcome.plan.containers,
            "fat_binaries_without_code": outcome.plan.unfit,
            "embedded": outcome.plan.embedded,
            "embedded_zeroed": outcome.plan.zeroed,
        }
        for outcome in result.outcomes
    ]
    document = {
        "sm": options.sms[0] if len(options.sms) == 1 else options.sms,
        "dry_run": options.dry_run,
        "files": rows,
        "freed": sum(outcome.plan.freed for outcome in _in_scope(result)),
        "files_without_device_code": result.others,
        "links_out_of_tree": result.links_out,
    }
    return json.dumps(document, indent=2)


def as_table(result: Result) -> RenderableType:
    """Table with a row for each file, totals, and notes."""
    scope, outcomes = _in_scope(result), result.outcomes
    kept = sum(sum(outcome.plan.kept.values()) for outcome in scope)
    freed = sum(outcome.plan.freed for outcome in scope)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=bool(outcomes))
    table.add_column("file, architectures found", "total", overflow="fold", ratio=1)
    for name, total in (("kept MB", kept), ("freed MB", freed)):
        table.add_column(name, _mb(total), justify="right", no_wrap=True)
    base = os.path.commonpath([o.path.parent for o in outcomes]) if outcomes else "/"
    for outcome in outcomes:
        plan = outcome.plan
        details = filter(None, [architectures(plan.found), *_remarks(outcome, result)])
        below = [Padding(Text(detail, style="dim"), (0, 0, 0, 2)) for detail in details]
        file = Group(
            Text(shown(Path(os.path.relpath(outcome.path, base))), overflow="fold"), *below
        )
        sizes = [_mb(sum(plan.kept.values())), _mb(plan.freed)] if outcome in scope else ["-", "-"]
        table.add_row(file, *sizes)
    return Group(table, *(Text(note) for note in _notes(result, freed)))


def architectures(sizes: Mapping[str, int]) -> str:
    """Abbreviated labels, oldest first: "sm_80 90 90a, compute_80"."""
    groups = []
    for kind in ("sm_", "compute_", "lto_"):
        found = [label.removeprefix(kind) for label in sizes if label.startswith(kind)]
        found.sort(key=lambda arch: (int(re.sub(r"\D", "", arch) or 0), arch))
        if found:
            groups.append(kind + " ".join(found))
    return ", ".join(groups)


def _remarks(outcome: Outcome, result: Result) -> Iterable[str]:
    plan, skipped = outcome.plan, outcome.action == "skipped"
    if outcome.action == "refused":
        yield f"refused: {outcome.error.code if outcome.error else outcome.reason}"
        return
    if plan.unfit and not skipped:
        sms = sm_text(result.options.sms)
        yield f"nothing for {sms} in {plan.unfit} of {plan.containers}: kept whole"
    if plan.embedded:
        listed = ", ".join(f"{label} {_mb(size)}" for label, size in sorted(plan.embedded.items()))
        end = f"zeroed: {architectures(plan.zeroed)}" if plan.zeroed else "not pruned"
        yield f"embedded MB: {listed}; {end}"
    yield f"skipped: {outcome.reason}" if skipped else outcome.reason


def _notes(result: Result, freed: int) -> Iterable[str]:
    options = result.options
    counts = dict.fromkeys(("pruned", "unchanged", "skipped", "refused"), 0)
    for outcome in result.outcomes:
        counts[outcome.action] += 1
    said = [f"{number} {action}" for action, number in counts.items() if number]
    if options.dry_run and counts["pruned"]:
        said[0] = f"{counts['pruned']} to prune (dry run: nothing was written)"
    said.append(f"{result.others} without device code")
    yield f"{sm_text(options.sms)}: {', '.join(said)}."
    if result.links_out:
        yield f"{result.links_out} links out of the tree were not followed."
    if counts["skipped"]:
        yield "--all-licences prunes what was skipped; see to it that you may."
    if any(o.plan.embedded and not o.plan.zeroed for o in _in_scope(result)):
        yield "--embedded zeroes embedded cubins of other GPUs."
    if freed:
        yield (
            "Freed bytes are zeros: they shrink the compressed layer (pull, push, registry), not"
            " the unpacked files."
        )


def _in_scope(result: Result) -> list[Outcome]:
    return [o for o in result.outcomes if o.action in ("pruned", "unchanged")]


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f}"
