"""Whether there will be something to read where the arguments of a config say so."""

from __future__ import annotations

from pathlib import PurePosixPath

from cog_triton.builder.command_line import shown
from cog_triton.builder.config import BuildConfig
from cog_triton.builder.legacy.image_paths import MODEL, relative, resolved
from cog_triton.errors import UnknownArgument

_READ = ("model_dir", "checkpoint_dir")


def check_inputs(config: BuildConfig) -> None:
    """Refuse a directory that is neither the model nor written by an earlier step.

    An absolute path may be anything, but for ``/src/...``, which is the work directory.

    Raises:
        UnknownArgument: one line for each of them: YAML path, value and rule.
    """
    lines: list[str] = []
    there = [PurePosixPath(MODEL)]
    for name, step in config.steps():
        for key in _READ:
            value = step.args.get(key)
            if isinstance(value, str) and not _is_there(value, config.model_id, there):
                lines.append(
                    f"{name}.args.{key}: {shown(value)}: no step before {name} writes it, and it"
                    " is not the model: is the convert step missing?"
                )
        # A script may also write beside its output_dir, where its arguments say.
        texts = [step.output_dir, *(v for v in step.args.values() if isinstance(v, str) and v)]
        there += [PurePosixPath(relative(text)) for text in texts]
    if lines:
        raise UnknownArgument("\n".join(lines))


def _is_there(value: str, model_id: str, there: list[PurePosixPath]) -> bool:
    path = PurePosixPath(resolved(value, model_id, MODEL))
    return path.is_absolute() or any(
        path.is_relative_to(known) or known.is_relative_to(path) for known in there
    )
