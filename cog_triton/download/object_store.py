"""Objects of S3, Google Cloud Storage and Azure Blob Storage, read in ranges by obstore.

Credentials are those of each provider's own chain: environment, files, roles of the machine. What
the library says of an error is not shown, since it may quote them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cog_triton.download.http_source import Answer, FileIdentity
from cog_triton.download.retry import TransientError, is_transient
from cog_triton.errors import MissingExtra, ModelUnavailable
from cog_triton.system.redaction import redact_address

if TYPE_CHECKING:
    import asyncio

_CHUNK = 1 << 20
_RETRIES = {"max_retries": 2}  # of requests for tokens, too; `Backoff` does the rest
_TIMEOUTS = {"connect_timeout": "20s", "read_timeout": "60s", "timeout": "7days"}
_ENDPOINTS = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "GOOGLE_BASE_URL",
    "AZURE_STORAGE_ENDPOINT",
)
# An error of the request of the object, and not of one for a token.
_REQUEST = re.compile(r"Generic \w+ error: Error performing HEAD ")
_STATUS = re.compile(r" status code: (\d{3}) ")
_STORES = {
    "s3": (
        "S3Store",
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE (by boto3, if that is installed),"
        " or the role of the machine",
    ),
    "gs": (
        "GCSStore",
        "GOOGLE_APPLICATION_CREDENTIALS (a file of a service account or a user), gcloud auth"
        " application-default login, or the machine's service account",
    ),
    "az": (
        "AzureStore",
        "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or"
        " AZURE_STORAGE_CONNECTION_STRING, AZURE_USE_AZURE_CLI=true after az login, or a managed"
        " identity",
    ),
}
"""By scheme: obstore's class, and where credentials come from."""


def is_object(url: str) -> bool:
    """Whether `url` names an object of a store: ``s3://``, ``gs://`` or ``az://``."""
    return url.partition("://")[0].lower() in _STORES and "://" in url


class ObjectSource:
    """Object at `url`, which errors call `name`; a source of ranges, as `HTTPSource` is.

    Raises:
        ModelUnavailable: not BUCKET/PATH, or with a user, password, query or fragment.
        MissingExtra: obstore is not installed; says what to run.
    """

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        self._scheme = url.partition("://")[0].lower()
        bucket, self._key = _parts(url)
        try:
            import obstore.store
        except ImportError:
            raise MissingExtra(
                f"{name}: {self._scheme}:// needs obstore: pip install 'cog-triton[buckets]'"
            ) from None
        self._library = obstore
        kind, self._credentials = _STORES[self._scheme]
        with self._errors():
            options = {"s3": _s3, "gs": dict, "az": _azure}[self._scheme]()
            endpoints = [options.get("endpoint", ""), *map(os.environ.get, _ENDPOINTS)]
            plain = any(url and url.startswith("http://") for url in endpoints)
            client = {**_TIMEOUTS, "allow_http": plain}
            store = getattr(obstore.store, kind)
            self._store = store(bucket, client_options=client, retry_config=_RETRIES, **options)

    def close(self) -> None:
        """Nothing: the library closes what it opened."""

    @contextmanager
    def get(self, start: int = 0, stop: int | None = None) -> Iterator[Answer]:
        """The bytes from `start` up to `stop`, or the whole object, as it is now.

        Raises:
            TransientError: a retry may help; also while the chunks are read.
            ModelUnavailable: it will not.
        """
        with self._errors(), _runner() as runner:
            # Not `head`: that cannot be interrupted.
            meta = runner.run(_call(self._library.head_async, self._store, self._key))
        size, etag = meta["size"], meta["e_tag"]
        identity = FileIdentity(size, etag, str(meta["last_modified"]))
        chunks = self._chunks(start, size if stop is None else min(stop, size), etag)
        yield Answer(stop is None, start, identity, chunks)

    def _chunks(self, start: int, stop: int, etag: str | None) -> Iterator[bytes]:
        """Bytes of the object, as long as it has that `etag`."""
        if start >= stop:
            return  # a range without a byte is an error
        options = {"range": (start, stop), **({"if_match": etag} if etag else {})}
        try:
            with _runner() as runner:
                get = _call(self._library.get_async, self._store, self._key, options=options)
                found = runner.run(get)
                stream = found.stream(min_chunk_size=_CHUNK)
                while (chunk := runner.run(_call(anext, stream, None))) is not None:
                    yield chunk
        except (self._library.exceptions.BaseError, FileNotFoundError) as error:
            raise TransientError(f"cut off ({type(error).__name__})") from None

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Context that turns the library's errors into coded or transient ones, by their kind."""
        try:
            yield
        except FileNotFoundError:
            raise ModelUnavailable(f"{self.name}: there is no such object or bucket") from None
        except (self._library.exceptions.BaseError, ValueError) as error:
            text = str(error)
            if not _REQUEST.match(text):
                raise ModelUnavailable(
                    f"{self.name}: not authorised ({type(error).__name__}); credentials come from"
                    f" {self._credentials}"
                ) from None
            match = _STATUS.search(text)
            status = int(match[1]) if match else None
            if status is None and "redirect" not in text:
                raise TransientError("cannot be reached, or gave no answer") from None
            if status is not None and is_transient(status):
                raise TransientError(f"HTTP {status}") from None
            region = "; is AWS_REGION the bucket's?" if self._scheme == "s3" else ""
            what = f"HTTP {status}" if status else "a redirect"
            raise ModelUnavailable(f"{self.name}: refused ({what}){region}") from None


def _runner() -> asyncio.Runner:
    import asyncio  # who reads no bucket starts without it

    return asyncio.Runner()


async def _call(function: Callable[..., Awaitable[Any]], *values: Any, **options: Any) -> Any:
    return await function(*values, **options)


def _parts(url: str) -> tuple[str, str]:
    """Bucket and key of an object."""
    try:
        parts = urlsplit(url)
        plain = not (parts.query or parts.fragment or "@" in parts.netloc)
    except ValueError:
        plain = False
    _, _, path = url.partition("://")
    bucket, _, key = path.partition("/")
    odd = {"", ".", ".."} & {*key.rstrip("/").split("/")}
    if not plain or not bucket or odd or not path.isprintable():
        raise ModelUnavailable(
            f"{redact_address(url)}: must be SCHEME://BUCKET/PATH, without credentials, query or"
            " fragment: the store's own chain has the credentials"
        )
    return bucket, key


def _s3() -> dict[str, Any]:
    """Credential provider for what obstore lacks of AWS's chain: profiles, SSO, assumed roles."""
    if {"AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE"} & os.environ.keys():
        return {}
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        if "AWS_PROFILE" in os.environ:
            raise ModelUnavailable(
                "AWS_PROFILE needs boto3: pip install boto3, or set AWS_ACCESS_KEY_ID and"
                " AWS_SECRET_ACCESS_KEY"
            ) from None
        return {}
    try:
        return {"credential_provider": Boto3CredentialProvider()}
    except Exception as error:  # noqa: BLE001  a tree of its own
        raise ValueError(type(error).__name__) from None


def _azure() -> dict[str, Any]:
    """Settings of a connection string and of AZURE_STORAGE_ANON, which obstore does not read."""
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    given = dict(part.partition("=")[::2] for part in text.split(";"))
    if suffix := given.get("EndpointSuffix"):
        host = f"{given.get('AccountName')}.blob.{suffix}"
        given.setdefault("BlobEndpoint", f"{given.get('DefaultEndpointsProtocol')}://{host}")
    keys = {
        "AccountName": "account_name",
        "AccountKey": "account_key",
        "BlobEndpoint": "endpoint",
        "SharedAccessSignature": "sas_key",
    }
    options = {ours: given[theirs] for theirs, ours in keys.items() if given.get(theirs)}
    anonymous = os.environ.get("AZURE_STORAGE_ANON", "").lower() in ("1", "true", "yes")
    return {**options, "skip_signature": "true"} if anonymous else options
