"""Input check: each directory that a step reads must be the model or an earlier step's output."""

from __future__ import annotations

from pathlib import PurePosixPath

from cog_triton.builder.command_line import shown
from cog_triton.builder.config import BuildConfig
from cog_triton.builder.legacy.image_paths import MODEL, relative, resolved
from cog_triton.errors import UnknownArgument

_INPUT_ARGUMENTS = ("model_dir", "checkpoint_dir")


def check_inputs(config: BuildConfig) -> None:
    """Refuse a directory that is neither the model nor an earlier step's output.

    An absolute path may be anything, but for ``/src/...``, which is the work directory.

    Raises:
        UnknownArgument: one line for each of them: YAML path, value and rule.
    """
    lines: list[str] = []
    available = [PurePosixPath(MODEL)]
    for name, step in config.steps():
        for key in _INPUT_ARGUMENTS:
            value = step.args.get(key)
            if isinstance(value, str) and not _is_available(value, config.model_id, available):
                lines.append(
                    f"{name}.args.{key}: {shown(value)}: no step before {name} writes it, and it"
                    " is not the model: is the convert step missing?"
                )
        # A script may also write beside its output_dir, where its arguments say.
        texts = [step.output_dir, *(v for v in step.args.values() if isinstance(v, str) and v)]
        available += [PurePosixPath(relative(text)) for text in texts]
    if lines:
        raise UnknownArgument("\n".join(lines))


def _is_available(value: str, model_id: str, available: list[PurePosixPath]) -> bool:
    path = PurePosixPath(resolved(value, model_id, MODEL))
    return path.is_absolute() or any(
        path.is_relative_to(known) or known.is_relative_to(path) for known in available
    )
