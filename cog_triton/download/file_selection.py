"""Selection of the files of a hub repository that a build needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from cog_triton.errors import ModelUnavailable

_CONFIG_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
_FORMATS = {"safetensors": ("*.safetensors",), "bin": ("*.bin",), "pt": ("*.pt", "*.pth")}
# What trainers and other runtimes leave beside the weights.
_NOT_WEIGHTS = ("training_args.bin", "optimizer*", "scheduler*", "rng_state*", "openvino_*")
_SHOWN = 12


def choose(
    names: Iterable[str], files: Sequence[str] | None, weight_format: str | None, where: str
) -> list[str]:
    """Names of the files to fetch, sorted.

    Args:
        names: every file of the repository.
        files: shell patterns, ``*`` reaching across ``/``; given, they alone decide.
        weight_format: safetensors, bin or pt; default the first of them that exists.
        where: what errors call the repository.

    Raises:
        ModelUnavailable: nothing matches, or there are no weights.
    """
    names = sorted(names)
    if files is not None:
        found = [name for name in names if _matches(name, files)]
        if not found:
            raise ModelUnavailable(
                f"{where}: no file matches {', '.join(files)}; there is {_listed(names)}"
            )
        return found
    top = [name for name in names if "/" not in name]
    weights = {kind: _weights(top, patterns) for kind, patterns in _FORMATS.items()}
    there = [kind for kind in weights if weights[kind]]
    kind = weight_format or (there[0] if there else None)
    if kind not in there:
        wanted = f"weight_format {kind}" if kind else "safetensors, bin or pt"
        raise ModelUnavailable(
            f"{where}: has no weights as {wanted} beside its config; give files: with patterns "
            f"of what to fetch; there is {_listed(names)}"
        )
    foreign = [f"*{pattern[1:]}.index.json" for other in _FORMATS for pattern in _FORMATS[other]]
    own = [f"*{pattern[1:]}.index.json" for pattern in _FORMATS[kind]]
    beside = [
        name
        for name in top
        if _matches(name, _CONFIG_FILES) and (_matches(name, own) or not _matches(name, foreign))
    ]
    return sorted(beside + weights[kind])


def _weights(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    found = [n for n in names if _matches(n, patterns) and not _matches(n, _NOT_WEIGHTS)]
    # Some repositories hold the same weights a second time, in their author's own layout.
    others = [name for name in found if not name.startswith("consolidated")]
    return others or found


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(names[:_SHOWN]) or "nothing") + more
