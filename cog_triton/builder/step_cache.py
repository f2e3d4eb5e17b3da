"""Build cache: fingerprints that decide whether a step can be skipped.

A fingerprint covers the step's script, arguments, environment, versions and input; a finished step
is skipped while its fingerprint is the same and its output is untouched.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from cog_triton import __version__
from cog_triton.builder.canary_run import PROMPT, TOKENS
from cog_triton.builder.packed_adapters import PackedAdapter
from cog_triton.builder.plan import Plan, Step
from cog_triton.download import model_source
from cog_triton.download.model_request import FetchedModel
from cog_triton.system.atomic_write import write_json

_PACKAGE = "package"
_RECORDS = "stamps"  # a name that configs may not give to an output
_PACKAGES = ("gguf", "numpy", "openvino", "openvino-genai", "openvino-tokenizers", "tokenizers")


def versions() -> dict[str, str]:
    """Versions of all that can change what a step writes in our own Python."""
    found = {"python": platform.python_version(), "cog_triton": __version__}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def located(plan: Plan, models: Path) -> Plan:
    """`plan` with its fingerprints if the model is in `models`, or needs no download; else `plan`.

    Raises:
        ModelUnavailable: see `model_source.locate`.
    """
    here = model_source.locate(plan.request, models)
    return plan if here is None else fingerprinted(plan, here)


def fingerprinted(plan: Plan, model: FetchedModel) -> Plan:
    """`plan` with `model`, and the fingerprint of what each step would do with it.

    A step's depends on that of the one before it, whatever directory that one wrote.
    """
    if plan.here == model:
        return plan
    before = digest([str(model.path), listing(model.path)])
    steps: list[Step] = []
    for step in plan.steps:
        before = digest([step.script.name, _code(step), step.args, step.env, before])
        steps.append(replace(step, fingerprint=before))
    return replace(plan, steps=tuple(steps), here=model)


def finished(step: Step) -> Path | None:
    """What the step wrote, if it ran with its fingerprint and its output is untouched since."""
    if step.fingerprint is None:
        return None
    try:
        record = json.loads(record_path(step.cwd, step.name).read_text("utf-8"))
        written = step.cwd / str(record["written"])
        if record["fingerprint"] == step.fingerprint and record["output"] == listing(written):
            return written
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def remember(step: Step, written: Path) -> None:
    """Record that the step has finished, and which directory it wrote."""
    relative = str(written.relative_to(step.cwd))
    write_json(
        record_path(step.cwd, step.name),
        {"fingerprint": step.fingerprint, "written": relative, "output": listing(written)},
    )


def forget(step: Step) -> None:
    """Remove the record of a step that is about to run: its output is unfinished from here on."""
    record_path(step.cwd, step.name).unlink(missing_ok=True)


def elsewhere(step: Step, others: Iterable[Path]) -> Step | None:
    """Find the same step, finished, in one of `others`, which are work directories."""
    for other in others:
        output_dir = other / step.output_dir.relative_to(step.cwd)
        twin = replace(step, cwd=other, output_dir=output_dir)
        if finished(twin) is not None:
            return twin
    return None


def adopt(step: Step, others: Iterable[Path]) -> Path | None:
    """Take over, by hard links, what the same step wrote in one of `others`; None if none did.

    The other build may be running; what it changed meanwhile is not taken.
    """
    twin = elsewhere(step, others)
    found = None if twin is None else finished(twin)
    if twin is None or found is None:
        return None
    written = step.cwd / found.relative_to(twin.cwd)
    forget(step)
    shutil.rmtree(written, ignore_errors=True)
    with contextlib.suppress(OSError):
        shutil.copytree(found, written, copy_function=_link_or_copy, symlinks=True)
        if finished(twin) == found:
            remember(step, written)
            return written
    shutil.rmtree(written, ignore_errors=True)
    return None


@contextlib.contextmanager
def packing(plan: Plan, output: Path, adapters: Sequence[PackedAdapter] = ()) -> Iterator[bool]:
    """Whether `output` is what the last build of `plan` packed, untouched; recorded at the end."""
    path = record_path(plan.work_dir, _PACKAGE)
    try:
        known = bool(json.loads(path.read_text("utf-8")) == _packed(plan, output, adapters))
    except (OSError, ValueError):
        known = False
    yield known
    write_json(path, _packed(plan, output, adapters))


def _packed(plan: Plan, output: Path, adapters: Sequence[PackedAdapter]) -> dict[str, Any]:
    stat = output.stat()
    identity = [str(output.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino]
    fingerprint = plan.steps[-1].fingerprint
    return {
        "fingerprint": fingerprint,
        "output": identity,
        "versions": versions(),
        "canary": [PROMPT, TOKENS],
        "adapters": [
            [each.name, each.entry.model_dump(), listing(each.adapter.directory)]
            for each in adapters
        ],
    }


def record_path(work_dir: Path, name: str) -> Path:
    """Where the record of a stage is."""
    return work_dir / _RECORDS / f"{name}.json"


def _code(step: Step) -> list[Any]:
    """Code that the step runs: that of its family, or its command, and its Python."""
    path = step.script.path
    if path.suffix != ".py":
        return [*_stat(path), *python_of(step.script.python)]
    family = sorted(path.parent.glob("*.py"))
    code = [[f.name, hashlib.sha256(f.read_bytes()).hexdigest()] for f in family]
    return [code, *python_of(step.script.python)]


def python_of(name: str) -> list[Any]:
    """A Python that is run, and what is installed in it."""
    if name == sys.executable:
        return [versions()]
    python = Path(name)
    packages = sorted(python.parent.parent.glob("lib/python3.*/site-packages"))
    return [str(python), __version__, *map(_stat, packages)]


def _stat(path: Path) -> list[Any]:
    with contextlib.suppress(OSError):
        stat = path.stat()
        return [str(path), stat.st_size, stat.st_mtime_ns]
    return [str(path)]


def listing(root: Path) -> list[list[Any]]:
    """Name, size and time of each file below `root`, sorted."""
    paths = sorted(root.rglob("*")) if root.is_dir() else [root]
    files = [(path, path.stat()) for path in paths if path.is_file()]
    return [[str(path.relative_to(root)), s.st_size, s.st_mtime_ns] for path, s in files]


def _link_or_copy(file: str, to: str) -> None:
    try:
        os.link(file, to)
    except OSError:  # no hard links here
        shutil.copy2(file, to)


def digest(value: Any) -> str:
    """Fingerprint of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
