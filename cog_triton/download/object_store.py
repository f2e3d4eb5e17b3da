"""Objects of S3, Google Cloud Storage and Azure Blob Storage, read in ranges through fsspec.

Credentials are those of each provider's own chain: environment, profiles, instance roles. What the
libraries say of an error is not shown, since it may quote them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from cog_triton.download.http_source import Answer, FileIdentity
from cog_triton.download.retry import TransientError, is_transient
from cog_triton.errors import CogTritonError, MissingExtra, ModelUnavailable
from cog_triton.system.redaction import redact_address

_CHUNK = 4 << 20


class _Store(NamedTuple):
    """Package that a scheme needs, and where its credentials come from."""

    package: str
    title: str
    credentials: str


_STORES = {
    "s3": _Store(
        "s3fs",
        "S3",
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the role of the machine",
    ),
    "gs": _Store(
        "gcsfs",
        "Google Cloud Storage",
        "GOOGLE_APPLICATION_CREDENTIALS, gcloud auth application-default login, or the machine's"
        " service account",
    ),
    "az": _Store(
        "adlfs",
        "Azure Blob Storage",
        "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or"
        " AZURE_STORAGE_CONNECTION_STRING, az login, or a managed identity",
    ),
}
_REFUSED = ("Credential", "Authentication", "Refresh", "Anonymous", "SSOToken", "TokenRetrieval")


def is_object(url: str) -> bool:
    """Whether `url` names an object of a store: ``s3://``, ``gs://`` or ``az://``."""
    return url.partition("://")[0].lower() in _STORES and "://" in url


class ObjectSource:
    """Object at `url`, which errors call `name`; a source of ranges, as `HTTPSource` is.

    Raises:
        ModelUnavailable: not BUCKET/PATH, or with a user, password, query or fragment.
        MissingExtra: the store's package is not installed; says what to run.
    """

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        self._scheme = url.partition("://")[0].lower()
        self._path = _path(url)
        self._store = _STORES[self._scheme]
        self._system = self._opened()

    def close(self) -> None:
        """Nothing: the library closes what it opened."""

    @contextmanager
    def get(self, start: int = 0, stop: int | None = None) -> Iterator[Answer]:
        """The bytes from `start` up to `stop`, or the whole object, as it is now.

        Raises:
            TransientError: a retry may help; also while the chunks are read.
            ModelUnavailable: it will not.
        """
        with self._errors():
            info: Mapping[str, Any] = self._system.info(self._path)
            size = info.get("size")
            if info.get("type") != "file" or not isinstance(size, int):
                raise ModelUnavailable(f"{self.name}: is no object, but a prefix of some")
        identity = FileIdentity(
            size,
            _text(info, "ETag", "etag", "generation"),
            _text(info, "LastModified", "updated", "last_modified"),
        )
        end = size if stop is None else min(stop, size)
        yield Answer(stop is None, start, identity, self._chunks(start, end))

    def _chunks(self, at: int, end: int) -> Iterator[bytes]:
        while at < end:
            with self._errors():
                chunk = self._system.cat_file(self._path, start=at, end=min(at + _CHUNK, end))
            if not chunk:
                return
            yield chunk
            at += len(chunk)

    def _opened(self) -> Any:
        extra = f"pip install 'cog-triton[{self._scheme}]'"
        try:
            import fsspec

            options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
            if self._scheme == "az" and "AZURE_STORAGE_ANON" not in os.environ:
                options["anon"] = False  # else it asks nobody for credentials
            with self._errors():
                return fsspec.filesystem(self._scheme, **options)
        except ImportError:
            raise MissingExtra(
                f"{self.name}: {self._store.title} needs {self._store.package}: {extra}"
            ) from None

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Context that turns the library's errors into coded or transient ones, by their kind."""
        try:
            yield
        except (CogTritonError, ImportError):
            raise
        except FileNotFoundError:
            raise ModelUnavailable(f"{self.name}: there is no such object or bucket") from None
        except Exception as error:  # noqa: BLE001  each library has its own tree
            kind = type(error).__name__
            status = _status(error)
            known = isinstance(error, PermissionError) or status in (401, 403)
            if known or any(part in kind for part in _REFUSED):
                raise ModelUnavailable(
                    f"{self.name}: not authorised ({kind}); credentials come from"
                    f" {self._store.credentials}"
                ) from None
            told = f" {status}" if status else ""
            refused = status is not None and status >= 400 and not is_transient(status)
            if refused or isinstance(error, ValueError):
                raise ModelUnavailable(f"{self.name}: refused ({kind}{told})") from None
            raise TransientError(f"{kind}{told}") from None


def _path(url: str) -> str:
    try:
        parts = urlsplit(url)
        plain = not (parts.query or parts.fragment or "@" in parts.netloc)
    except ValueError:
        plain = False
    _, _, path = url.partition("://")
    bucket, _, key = path.partition("/")
    if not plain or not bucket or not key or not key.strip("/") or not path.isprintable():
        raise ModelUnavailable(
            f"{redact_address(url)}: must be SCHEME://BUCKET/PATH, without credentials, query or"
            " fragment: the store's own chain has the credentials"
        )
    return path


def _status(error: Exception) -> int | None:
    """HTTP status of an error, where its library keeps it."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    for value in (getattr(error, "status_code", None), getattr(error, "code", None), response):
        if isinstance(value, int):
            return value
        if isinstance(value, str) and value.isdecimal():
            return int(value)
    return None


def _text(info: Mapping[str, Any], *keys: str) -> str | None:
    return next((str(info[key]) for key in keys if info.get(key)), None)
