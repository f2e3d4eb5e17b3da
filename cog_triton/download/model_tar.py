"""Models from a tar at a URL or path: downloaded, unpacked once, then reused."""

from __future__ import annotations

import hashlib
import re
import threading
from pathlib import Path

from cog_triton.download import disk_space, model_archive
from cog_triton.download import fetch as downloads
from cog_triton.download.local import checked
from cog_triton.download.model_request import FetchedModel
from cog_triton.download.retry import RetryPolicy
from cog_triton.download.transfer_progress import Echo
from cog_triton.errors import ModelUnavailable, UserError

_SHA256 = re.compile(r"[0-9a-f]{64}")


class ModelTar:
    """Model tar at `url`, unpacked to a directory below `store`.

    The directory is named by the tar's sha256 if that is given, else by the whole URL, or by a
    local file's path, size and time.

    Raises:
        ModelUnavailable: `sha256` is no such sum, or `url` none that `fetch` takes.
    """

    def __init__(self, url: str, sha256: str | None, store: Path) -> None:
        self._url = url
        self._sha256 = None if sha256 is None else sha256.lower()
        if self._sha256 is not None and not _SHA256.fullmatch(self._sha256):
            raise ModelUnavailable("model_tar_sha256 must be 64 hexadecimal digits")
        self._local = downloads.local_path(url)
        key = hashlib.sha256(self._identity().encode()).hexdigest()[:16]
        revision = None if self._sha256 is None else f"sha256:{self._sha256}"
        self._model = FetchedModel(store.absolute() / "tars" / key, revision)

    def locate(self) -> FetchedModel | None:
        """The unpacked directory, if it exists."""
        return self._model if self._model.path.is_dir() else None

    def size(self) -> int | None:
        """Bytes to download; None if unknown now. One request, never fails."""
        if self._local is not None or self.locate() is not None:
            return 0
        return downloads.size(self._url)

    def fetch(self, echo: Echo, retry: RetryPolicy, stop: threading.Event) -> FetchedModel:
        """The unpacked directory; downloads and unpacks it if missing.

        Raises:
            As `model_source.fetch_model`.
        """
        target = self._model.path
        if self.locate() is None:
            name = downloads.redacted_name(self._url)
            with disk_space.coded_errors(target, name):
                target.parent.mkdir(parents=True, exist_ok=True)
                with disk_space.locked(target, echo, stop):
                    if self.locate() is None:
                        self._make(target, name, echo, retry, stop)
        return self._model

    def _make(
        self, target: Path, name: str, echo: Echo, retry: RetryPolicy, stop: threading.Event
    ) -> None:
        download = target.with_name(f"{target.name}.tar")
        tar = downloads.fetch(
            self._url, download, sha256=self._sha256, echo=echo, retry=retry, stop=stop
        )
        try:
            model_archive.unpack(tar, target, name, lambda path: checked(path, name), echo)
        except UserError:
            download.unlink(missing_ok=True)  # the URL's next content may be good
            raise
        download.unlink(missing_ok=True)

    def _identity(self) -> str:
        if self._sha256 is not None:
            return self._sha256
        if self._local is None or not self._local.is_file():
            return self._url
        stat = self._local.stat()
        return f"{self._local.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
