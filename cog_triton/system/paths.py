"""Paths of a user's home, and of the package's data: Cog projects, Triton's models, locks.

A wheel and an image carry them in ``cog_triton/_data``, a checkout beside the package. A name
alone proves nothing: site-packages may hold someone else's ``runner``, so what is taken has the
files of such a directory, and its code imports this package.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from cog_triton.errors import TritonStartFailed

_PACKAGE = Path(__file__).resolve().parents[1]


def expanded(text: str) -> Path:
    """Path whose ``~`` is the home directory, and stays where that user has none, as in a pod."""
    return Path(os.path.expanduser(text))  # noqa: PTH111, Path's raises


def cog_project(name: Literal["runner", "builder", "mock_cog_triton"]) -> Path:
    """Directory of one of our Cog projects: it has a cog.yaml, and predict.py is ours.

    Raises:
        TritonStartFailed: this installation has none; names where it was looked for.
    """
    return _find(name, "cog.yaml", "predict.py")


def triton_model_repo() -> Path:
    """Directory of the Triton models to render: each has a config.pbtxt, and their code is ours.

    Raises:
        TritonStartFailed: as `cog_project`.
    """
    return _find("triton_model_repo", "tensorrt_llm/config.pbtxt", "preprocessing/1/model.py")


def data_file(name: str) -> Path:
    """Path of a file that a wheel carries, by its path in a checkout.

    Raises:
        TritonStartFailed: this installation lacks it; names where it was looked for.
    """
    places = [_PACKAGE / "_data" / name, _PACKAGE.parent / name]
    for place in places:
        if place.is_file():
            return place
    raise TritonStartFailed(
        f"this installation of cog_triton lacks {name}: it is neither {places[0]} nor {places[1]};"
        " install it again"
    )


def _find(name: str, mark: str, code: str) -> Path:
    places = [_PACKAGE / "_data" / name, _PACKAGE.parent / name]
    for place in places:
        ours = (place / mark).is_file() and (place / code).is_file()
        if ours and "cog_triton" in (place / code).read_text("utf-8", "replace"):
            return place
    raise TritonStartFailed(
        f"this installation of cog_triton lacks its {name}: there is none in {places[0]}, nor a"
        f" checkout's in {places[1]}; install it again"
    )
