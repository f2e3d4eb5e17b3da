"""Models from a tar at a URL or path: downloaded, unpacked once, then reused."""

from __future__ import annotations

import hashlib
import re
import shutil
import threading
from pathlib import Path

from cog_triton.artifact import tar_members
from cog_triton.download import disk_space, url_download
from cog_triton.download.model_request import FetchedModel, checked
from cog_triton.download.retry import RetryPolicy
from cog_triton.download.transfer_progress import Echo, size_text
from cog_triton.errors import ModelUnavailable, UserError
from cog_triton.system.atomic_write import sync_directory

_CHUNK = 1 << 20


class ModelTar:
    """Model tar at `url`, unpacked to a directory below `store`.

    The directory is named by the tar's sha256 if that is given, else by the whole URL, or by a
    local file's path, size and time.

    Raises:
        ModelUnavailable: `sha256` is no such sum, or `url` none that `fetch` takes.
    """

    def __init__(self, url: str, sha256: str | None, store: Path) -> None:
        self._url = url
        self._sha256 = identity = None if sha256 is None else sha256.lower()
        if identity is not None and not re.fullmatch("[0-9a-f]{64}", identity):
            raise ModelUnavailable("model_tar_sha256 must be 64 hexadecimal digits")
        self._local = url_download.local_path(url)
        if identity is None and self._local is not None and self._local.is_file():
            stat = self._local.stat()
            identity = f"{self._local.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
        key = hashlib.sha256((identity or url).encode()).hexdigest()[:16]
        revision = None if self._sha256 is None else f"sha256:{self._sha256}"
        self._model = FetchedModel(store.absolute() / "tars" / key, revision)

    def locate(self) -> FetchedModel | None:
        """The unpacked directory, if it exists."""
        return self._model if self._model.path.is_dir() else None

    def size(self) -> int | None:
        """Bytes to download; None if unknown now. One request, never fails."""
        if self._local is not None or self.locate() is not None:
            return 0
        return url_download.size(self._url)

    def fetch(self, echo: Echo, retry: RetryPolicy, stop: threading.Event) -> FetchedModel:
        """The unpacked directory; downloads and unpacks it if missing.

        Raises:
            As `model_source.fetch_model`.
        """
        if self.locate() is not None:
            return self._model
        target, name = self._model.path, url_download.redacted_name(self._url)
        with disk_space.writing(target, name, echo, stop):
            if self.locate() is None:
                download = target.with_name(f"{target.name}.tar")
                tar = url_download.fetch(
                    self._url, download, sha256=self._sha256, echo=echo, retry=retry, stop=stop
                )
                try:
                    _unpack(tar, target, name, echo)
                except UserError:
                    download.unlink(missing_ok=True)  # the URL's next content may be good
                    raise
                download.unlink(missing_ok=True)
        return self._model


def _unpack(tar: Path, target: Path, name: str, echo: Echo) -> None:
    """Unpack the model in `tar` to `target` atomically; not its sole top directory."""
    size = tar.stat().st_size
    disk_space.require(target.parent, size, f"{name}, unpacked,")
    with disk_space.scratch(target) as fresh:
        echo(f"[download] {name}: unpacking {size_text(size)}")
        for member in tar_members.read(tar):
            path = fresh / member.name
            path.parent.mkdir(parents=True, exist_ok=True)
            if member.content is not None:
                disk_space.require(fresh, member.size, f"{name}: member {member.name!r}")
                with path.open("xb") as file:
                    shutil.copyfileobj(member.content, file, _CHUNK)
            elif member.link is not None:
                path.symlink_to(member.link)
            else:
                path.mkdir(exist_ok=True)
        top, entries = fresh, list(fresh.iterdir())
        while len(entries) == 1 and entries[0].is_dir() and not entries[0].is_symlink():
            top, entries = entries[0], list(entries[0].iterdir())
        checked(top, name).chmod(0o755)
        top.rename(target)
        sync_directory(target.parent)
