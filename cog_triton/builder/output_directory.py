"""Output directory of a step: finds where its script really wrote."""

from __future__ import annotations

from pathlib import Path

from cog_triton.builder.plan import Step
from cog_triton.errors import BuildStepFailed


def written(step: Step, since_ns: int) -> Path:
    """Find the directory with the files of `step`, which succeeded and began at `since_ns`.

    It is `output_dir`, or the only directory below it that has files, as ``c-model/gpt2/1-gpu``;
    or the only such one below another directory that the arguments name.

    Raises:
        BuildStepFailed: there is none, or more than one; names them.
    """
    if step.output_dir.is_dir() and not step.output_dir.is_symlink():
        found = _holding_files(step.output_dir)
        if len(found) > 1:
            raise BuildStepFailed(
                f"step {step.name} wrote more than one directory below"
                f" {_name(step.output_dir, step)}: {', '.join(_name(p, step) for p in found)};"
                " output_dir must name one"
            )
        if found:
            return found[0]
    named = {
        step.cwd / value for value in step.args.values() if isinstance(value, str) and value != ""
    }
    others = {
        path
        for place in named
        if place.is_dir() and place.resolve().is_relative_to(step.cwd) and place != step.cwd
        for path in _holding_files(place)
        if _is_fresh(path, since_ns) and path != step.input
    }
    if len(others) == 1:
        return others.pop()
    beside = f"; it wrote {', '.join(sorted(_name(p, step) for p in others))}" if others else ""
    raise BuildStepFailed(
        f"step {step.name} ended well but wrote nothing into {_name(step.output_dir, step)}"
        f"{beside}: does output_dir say where the script writes?"
    )


def _holding_files(root: Path) -> list[Path]:
    """The topmost directories at or below `root` that have files in them."""
    if any(path.is_file() for path in root.iterdir()):
        return [root]
    below = (path for path in sorted(root.iterdir()) if path.is_dir() and not path.is_symlink())
    return [found for path in below for found in _holding_files(path)]


def _is_fresh(path: Path, since_ns: int) -> bool:
    return any(f.stat().st_mtime_ns >= since_ns for f in path.iterdir() if f.is_file())


def _name(path: Path, step: Step) -> str:
    return str(path.relative_to(step.cwd))
