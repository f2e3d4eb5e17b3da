"""Model on the Hugging Face hub: what it is and needs, before any of its weights are fetched."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from cog_triton.download import disk_space, hub, hub_cache
from cog_triton.download.hub_cache import choose
from cog_triton.download.model_request import ModelRequest, read_object
from cog_triton.download.model_source import fetch_model
from cog_triton.download.retry import RetryPolicy
from cog_triton.download.transfer_progress import Echo, size_text
from cog_triton.errors import DiskFull, ModelUnavailable
from cog_triton.system.atomic_write import write_json

_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_SMALL = ("config.json", "generation_config.json")


@dataclass(frozen=True)
class RevisionPins:
    """Commits by model and branch or tag, each in a file of its own below `directory`."""

    directory: Path

    def find(self, model_id: str, revision: str | None) -> str | None:
        """The commit to take, or None if the hub is to be asked; a commit needs no pin."""
        if hub_cache.is_commit(revision):
            return revision
        try:
            pin = json.loads(self._path(model_id, revision).read_text("utf-8"))
            commit = pin["commit"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return commit if isinstance(commit, str) and hub_cache.is_commit(commit) else None

    def set(self, model_id: str, revision: str | None, commit: str) -> None:
        """Pin the branch or tag to `commit`, in place of an earlier one."""
        if hub_cache.is_commit(revision):
            return
        pin = {"hub": constants.ENDPOINT, "model_id": model_id, "revision": revision or "main"}
        write_json(self._path(model_id, revision), {**pin, "commit": commit})

    def _path(self, model_id: str, revision: str | None) -> Path:
        of = "\0".join([constants.ENDPOINT, model_id, revision or "main"])
        return self.directory / f"{hashlib.sha256(of.encode()).hexdigest()[:16]}.json"


@dataclass(frozen=True)
class HubModel:
    """A model at one commit: its config.json and generation_config.json, and the files to fetch.

    Attributes:
        weights: bytes of its safetensors.
        missing: bytes that are not here yet.
    """

    model_id: str
    commit: str
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    weights: int
    missing: int

    @property
    def request(self) -> ModelRequest:
        """What to fetch: this commit, safetensors only."""
        return ModelRequest(self.model_id, revision=self.commit, weight_format="safetensors")


def look(model_id: str, revision: str | None, store: Path, echo: Echo) -> HubModel:
    """Ask the hub what a model is; fetches its configuration, a few kilobytes.

    A commit that is whole in the hub's cache needs no network.

    Args:
        store: of views of the hub's cache, see `hub_cache`.

    Raises:
        ModelUnavailable: it cannot be had, or has no weights as safetensors; says why.
    """
    wanted = ModelRequest(model_id, revision=revision, weight_format="safetensors")
    whole = hub_cache.cached_listing(wanted) if hub_cache.is_commit(revision) else None
    if whole is None:
        asked = ModelRequest(model_id, revision=revision)
        listing = hub.contents(asked, store, echo, RetryPolicy(), threading.Event())
        _require_safetensors(model_id, listing.files)
        names = choose(listing.files, None, "safetensors", model_id)
        whole = hub_cache.Listing(listing.commit, {name: listing.files[name] for name in names})
    small = tuple(name for name in _SMALL if name in whole.files)
    if "config.json" not in small:
        raise ModelUnavailable(f"{model_id} has no config.json, which says what model it is")
    missing = hub_cache.missing_bytes(model_id, whole)
    asked = ModelRequest(model_id, revision=whole.commit, files=small)
    view = fetch_model(asked, store, lambda _line: None).path
    return HubModel(
        model_id,
        whole.commit,
        read_object(view / "config.json", model_id),
        read_object(view / "generation_config.json", model_id) if len(small) > 1 else {},
        sum(f.size for name, f in whole.files.items() if name.endswith(".safetensors")),
        missing,
    )


def require_room(model: HubModel, kept: int, passing: int, store: Path, echo: Echo) -> None:
    """Tell what a model takes, and refuse it before a byte of it is fetched if it does not fit.

    Args:
        kept: bytes that stay in `store`, `passing` those that its conversion needs besides.

    Raises:
        DiskFull: names what is needed and what is free, and where.
    """
    cache = Path(constants.HF_HUB_CACHE)
    words = [f"{size_text(model.missing)} to download into {cache}"] if model.missing else []
    if kept:
        words.append(
            f"{size_text(kept + passing)} for the conversion in {store}, of which"
            f" {size_text(kept)} stay"
        )
    echo(f"[model] {model.model_id}: {'; '.join(words) or 'already here'}")
    disk_space.require(cache, model.missing, f"{model.model_id}: the download")
    disk_space.require(store, kept + passing, f"{model.model_id}: its conversion")
    if disk_space.same_file_system(cache, store):
        together = model.missing + kept + passing
        try:
            disk_space.require(store, together, f"{model.model_id}: download and conversion")
        except DiskFull as error:
            raise DiskFull(f"{error.detail}; HF_HOME may name another disk") from None


def _require_safetensors(model_id: str, files: Mapping[str, object]) -> None:
    top = sorted(name for name in files if "/" not in name)
    if any(name.endswith(".safetensors") for name in top):
        return
    pickled = [name for name in top if name.endswith(_PICKLED)]
    if pickled:
        raise ModelUnavailable(
            f"{model_id} has its weights pickled alone ({', '.join(pickled[:4])}), and to read"
            " those runs what code is in them: only safetensors are taken"
            " (huggingface.co/spaces/safetensors/convert makes them)"
        )
    ggufs = [name for name in top if name.endswith(".gguf")]
    if ggufs:
        raise ModelUnavailable(
            f"{model_id} has GGUF files alone ({', '.join(ggufs[:4])}): download one, and name it"
        )
    raise ModelUnavailable(
        f"{model_id} has no *.safetensors at its top, so it is no model to serve"
    )
