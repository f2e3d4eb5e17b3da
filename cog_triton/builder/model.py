"""The model of a build: what its config asks for, and what that takes."""

from __future__ import annotations

from pathlib import Path

from cog_triton.builder.config import BuildConfig
from cog_triton.download import model_source
from cog_triton.download.model_request import FetchedModel, ModelRequest
from cog_triton.errors import InvalidArgument, ModelUnavailable


def request_of(config: BuildConfig) -> ModelRequest:
    """What `config` asks for; of a tar, weight_format says nothing."""
    token = config.hf_token
    return ModelRequest(
        model_id=config.model_id,
        revision=config.revision,
        files=None if config.files is None else tuple(config.files),
        weight_format=None if config.model_tar_url else config.weight_format,
        model_tar_url=config.model_tar_url,
        model_tar_sha256=config.model_tar_sha256,
        token=None if token is None else token.get_secret_value(),
    )


def locate(config: BuildConfig, store: Path) -> FetchedModel | None:
    """The model if it is here; nobody is asked."""
    try:
        return model_source.locate(request_of(config), store)
    except ModelUnavailable:
        return None


def size_of(model: Path) -> int:
    """Bytes of a model that is here."""
    files = [path for path in model.rglob("*") if path.is_file()] if model.is_dir() else [model]
    return sum(path.stat().st_size for path in files)


def point_at(link: Path, model: Path) -> None:
    """Make `link` name the model; nothing is copied.

    Raises:
        InvalidArgument: something else has the link's name.
    """
    if link.is_symlink():
        link.unlink()
    elif link.exists():
        raise InvalidArgument(f"work_dir: {link} is there and is not this build's link")
    link.symlink_to(model)
