"""Cache of the Hugging Face hub on this machine, the files that a build needs, and views of them.

A view is a directory of links to exactly the files that one request selects: the cache's own
directory of a commit also holds whatever else was ever fetched of it, and a build must not depend
on that. A view is made when all its files are here, so it also marks that they are.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import HfApi, constants, get_cached_repo_tree, try_to_load_from_cache
from huggingface_hub.errors import CachedRepoTreeNotFoundError, RevisionResolutionError
from huggingface_hub.file_download import repo_folder_name

from cog_triton.artifact.engine_manifest import File
from cog_triton.download.model_request import FetchedModel, ModelRequest
from cog_triton.errors import ModelUnavailable
from cog_triton.system import atomic_write

_CONFIG_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
_FORMATS = {"safetensors": ("*.safetensors",), "bin": ("*.bin",), "pt": ("*.pt", "*.pth")}
# What trainers and other runtimes leave beside the weights.
_NOT_WEIGHTS = ("training_args.bin", "optimizer*", "scheduler*", "rng_state*", "openvino_*")
_SHOWN = 12
_COMMIT = re.compile(r"[0-9a-f]{40}")


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
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    there = f"there is {', '.join(names[:_SHOWN]) or 'nothing'}{more}"
    if files is not None:
        found = [name for name in names if _matches(name, files)]
        if not found:
            raise ModelUnavailable(f"{where}: no file matches {', '.join(files)}; {there}")
        return found
    top = [name for name in names if "/" not in name]
    for kind in [weight_format] if weight_format else _FORMATS:
        if weights := _weights(top, _FORMATS[kind]):
            break
    else:
        wanted = f"weight_format {weight_format}" if weight_format else "safetensors, bin or pt"
        raise ModelUnavailable(
            f"{where}: has no weights as {wanted} beside its config; give files: with patterns"
            f" of what to fetch; {there}"
        )
    own = _indexes(_FORMATS[kind])
    foreign = _indexes(pattern for other in _FORMATS.values() for pattern in other)
    beside = [
        name
        for name in top
        if _matches(name, _CONFIG_FILES) and (_matches(name, own) or not _matches(name, foreign))
    ]
    return sorted(beside + weights)


def _weights(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    found = [n for n in names if _matches(n, patterns) and not _matches(n, _NOT_WEIGHTS)]
    # Some repositories hold the same weights a second time, in their author's own layout.
    return [name for name in found if not name.startswith("consolidated")] or found


def _indexes(patterns: Iterable[str]) -> list[str]:
    return [f"*{pattern[1:]}.index.json" for pattern in patterns]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Listing:
    """The files that a request is for, by name, at one commit.

    Only large ones have a `sha256`, and are blobs of that name.
    """

    commit: str
    files: dict[str, File]


def is_commit(revision: str | None) -> bool:
    """Whether `revision` is a commit, which never moves."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def blob(model_id: str, sha256: str) -> Path:
    """Path of the large file with that sha256 in the cache."""
    return _folder(model_id) / "blobs" / sha256


def pointer(model_id: str, commit: str, name: str) -> Path | None:
    """Path of the file `name` in the cache, None if missing."""
    path = try_to_load_from_cache(model_id, name, revision=commit)
    return Path(path) if isinstance(path, str) and Path(path).exists() else None


def missing_bytes(model_id: str, listing: Listing) -> int:
    """Bytes of `listing` that are still to download; finished pieces of files count as present."""
    missing = 0
    for name, file in listing.files.items():
        if pointer(model_id, listing.commit, name) is not None:
            continue
        present = 0
        if file.sha256 is not None:
            whole = blob(model_id, file.sha256)
            partial = whole.with_name(f"{whole.name}.partial")
            if whole.is_file():
                present = file.size
            elif partial.is_file():
                present = partial.stat().st_blocks * 512
        missing += max(file.size - present, 0)
    return missing


def cached_listing(request: ModelRequest) -> Listing | None:
    """Listing of `request` by the cache alone, if every file of it is there."""
    commit = _cached_commit(request)
    if commit is None:
        return None
    try:
        tree = get_cached_repo_tree(request.model_id, revision=commit)
        sizes = {file.path: file.size for file in tree}
        chosen = choose(sizes, request.files, request.weight_format, request.model_id)
    except (CachedRepoTreeNotFoundError, ModelUnavailable):
        return None
    if any(pointer(request.model_id, commit, name) is None for name in chosen):
        return None
    return Listing(commit, {name: File(sizes[name]) for name in chosen})


def locate(request: ModelRequest, store: Path) -> FetchedModel | None:
    """View of `request` in `store`, if it was made and its files still exist."""
    commit = _cached_commit(request)
    if commit is None:
        return None
    path = _view(request, commit, store)
    links = list(path.rglob("*"))
    whole = bool(links) and all(link.exists() for link in links)
    return FetchedModel(path, commit) if whole else None


def make_view(request: ModelRequest, listing: Listing, store: Path) -> FetchedModel:
    """Make the view of `request` in `store`, in place of an old one; its files must be cached."""
    path = _view(request, listing.commit, store)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
        fresh = Path(scratch, "view")
        for name in listing.files:
            file = pointer(request.model_id, listing.commit, name)
            if file is None:
                raise ModelUnavailable(f"{request.model_id}: {name} has gone from the hub's cache")
            (fresh / name).parent.mkdir(parents=True, exist_ok=True)
            (fresh / name).symlink_to(file)
        shutil.rmtree(path, ignore_errors=True)
        fresh.rename(path)
    return FetchedModel(path, listing.commit)


def write_ref(request: ModelRequest, commit: str) -> None:
    """Write the commit that a branch or tag is now to where the library looks for it."""
    path = _folder(request.model_id) / "refs" / (request.revision or constants.DEFAULT_REVISION)
    if not is_commit(request.revision) and ".." not in path.parts:
        with atomic_write.writing(path, len(commit), at_most=False) as file:
            file.write(commit.encode())


def _cached_commit(request: ModelRequest) -> str | None:
    if is_commit(request.revision):
        return request.revision
    try:
        resolved = HfApi().resolve_revision(
            request.model_id, revision=request.revision, local_files_only=True
        )
    except RevisionResolutionError:
        return None
    return resolved.resolved if is_commit(resolved.resolved) else None


def _view(request: ModelRequest, commit: str, store: Path) -> Path:
    choice = json.dumps((request.files, request.weight_format))
    key = hashlib.sha256(choice.encode()).hexdigest()[:8]
    return store.absolute() / "hub" / _folder(request.model_id).name / f"{commit[:12]}-{key}"


def _folder(model_id: str) -> Path:
    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=model_id, repo_type="model"))
