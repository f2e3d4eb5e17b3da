"""Conversions of small random models by the scripts of a tree, and what came of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from upstream import script_runs
from upstream.checkpoint_comparison import differences
from upstream.families import EXAMPLES, Args, arguments
from upstream.installation import Installation
from upstream.layer_names import NAMES


@dataclass(frozen=True)
class Conversion:
    """A conversion of a family's model for `tp` ranks."""

    family: str
    tp: int
    args: Args
    checkpoint: Path
    stopped: str = ""
    """Why there is no checkpoint: the last line of the script, or what it lacks."""
    differences: tuple[str, ...] = ()
    """What of the checkpoint is not as computed from the model."""

    def __str__(self) -> str:
        result = self.stopped or "; ".join(self.differences[:3]) or "equal"
        return f"[convert] {self.family}, tp {self.tp}: {result}"


def convert(
    tree: Installation, models: Path, output: Path, families: Sequence[str], sizes: Sequence[int]
) -> list[Conversion]:
    """Convert the model of each family for each of `sizes` ranks, and compare all tensors."""
    scripts = {family: tree.converter(EXAMPLES[family]) for family in families}
    there = sorted({script for script in scripts.values() if script is not None})
    (output / "helps").mkdir()
    helps = [
        script_runs.Run(script, {"help": ""}, output / "helps" / f"{number}.log")
        for number, script in enumerate(there)
    ]
    script_runs.run(tree, helps)
    options = {
        each.script: {*re.findall(r"--(\w+)", each.log.read_text("utf-8"))} for each in helps
    }
    planned: list[tuple[Conversion, Path | None]] = []
    for family, script in scripts.items():
        for tp in sizes:
            checkpoint = output / f"{family}-tp{tp}"
            args: Args | str = "no convert_checkpoint.py"
            if script is not None:
                paths = str(models / family), str(checkpoint)
                args = arguments(family, options[script], *paths, tp)
            stopped = isinstance(args, str)
            conversion = Conversion(
                family, tp, {} if stopped else args, checkpoint, args if stopped else ""
            )
            planned.append((conversion, None if stopped else script))
    runs = [script_runs.Run(script, each.args, _log(each)) for each, script in planned if script]
    for run in runs:
        run.log.with_suffix("").mkdir()
    statuses = dict(zip([run.log for run in runs], script_runs.run(tree, runs), strict=True))
    return [_compared(tree, each, models, statuses.get(_log(each))) for each, _ in planned]


def _log(conversion: Conversion) -> Path:
    return conversion.checkpoint.with_suffix(".log")


def _compared(
    tree: Installation, conversion: Conversion, models: Path, status: int | None
) -> Conversion:
    if conversion.stopped:
        return conversion
    if status != 0:
        return replace(conversion, stopped=script_runs.cause_of(_log(conversion), tree.sources))
    family = conversion.family
    found = differences(NAMES[family], models / family, conversion.checkpoint, conversion.tp)
    return replace(conversion, differences=tuple(found))
