"""Where the repository's data directories are, in a checkout, a wheel and an image."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_dir(name: str) -> Path:
    """`name` (triton_model_repo or a Cog project) beside the package, or inside its wheel."""
    checkout = _PACKAGE.parent / name
    return checkout if checkout.is_dir() else _PACKAGE / "_data" / name
