"""Registry client of one repository: requests that are retried, refusals as coded errors."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx

from cog_triton.download.http_source import http_errors, retry_after
from cog_triton.download.retry import Backoff, RetryPolicy, TransientError, is_transient
from cog_triton.download.transfer_progress import Echo, Progress
from cog_triton.download.url_download import fetch
from cog_triton.errors import CogTritonError, EngineCorrupt, ModelUnavailable
from cog_triton.oci import credentials
from cog_triton.oci.credentials import RegistryAuth
from cog_triton.oci.image_manifest import ACCEPTED, IMAGE, MAX_MANIFEST, Descriptor, digest_of
from cog_triton.oci.reference import DIGEST, Reference
from cog_triton.system.printable import printable

_TIMEOUT = httpx.Timeout(30.0, read=300.0, pool=None)
_MAX_ERROR = 1 << 16
_CONNECTIONS = 4
_SHOWN = 200
Result = TypeVar("Result")


class Registry:
    """Repository of `reference` in its registry; within ``with``.

    Args:
        refused, failed: errors for a refusal, and for giving up after retries.
        tag: what is done, as the lines of retries begin.
    """

    def __init__(
        self,
        reference: Reference,
        echo: Echo,
        retry: RetryPolicy,
        stop: threading.Event,
        *,
        plain_http: Collection[str] = (),
        refused: type[CogTritonError] = ModelUnavailable,
        failed: type[CogTritonError] = ModelUnavailable,
        tag: str = "download",
    ) -> None:
        self.reference, self.echo, self.stop = reference, echo, stop
        self.url = reference.url(reference.host in plain_http)
        found = credentials.find(reference.host, reference.repository)
        self._auth = RegistryAuth(httpx.URL(self.url), found)
        self._retry, self._tag = retry, tag
        self._refused, self._failed = refused, failed
        self._client = httpx.Client(auth=self._auth, timeout=_TIMEOUT, follow_redirects=True)

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def backoff(
        self, progress: Callable[[], int] = int, stop: threading.Event | None = None
    ) -> Backoff:
        """Retries of one action, until `stop` is set.

        Args:
            progress: bytes that it has moved so far; more of them reset the count of failures.
        """
        name, stop = str(self.reference), stop or self.stop
        return Backoff(self._retry, name, self.echo, progress, stop, self._tag, self._failed)

    @contextmanager
    def answer(
        self, method: str, url: str | httpx.URL, expected: Collection[int], **options: Any
    ) -> Iterator[httpx.Response]:
        """Response of one request, not read yet, with one of the `expected` statuses.

        Args:
            url: one that begins with / is a path of the repository.

        Raises:
            TransientError: a retry may help.
            The error `refused`: it will not; has the registry's own words.
        """
        if isinstance(url, str):
            url = self.url + url
        with (
            http_errors(str(self.reference), self._refused),
            self._client.stream(method, url, **options) as response,
        ):
            if response.status_code not in expected:
                raise self._problem(response)
            yield response

    def manifest(self) -> tuple[str, bytes]:
        """Digest and body of the manifest; the body has that digest.

        Raises:
            ModelUnavailable: it cannot be had, or has another digest than was asked for.
            EngineCorrupt: it is over `MAX_MANIFEST`.
        """
        path = f"/manifests/{self.reference.digest or self.reference.tag}"
        headers = {"Accept": ", ".join(ACCEPTED), "Accept-Encoding": "identity"}

        def once() -> tuple[str, bytes | None]:
            with self.answer("GET", path, (200,), headers=headers) as response:
                sent = response.headers.get("docker-content-digest", "")
                return sent, _body(response, MAX_MANIFEST)

        sent, body = self.backoff().retried(once)
        if body is None:
            raise EngineCorrupt(f"{self.reference}: its manifest has over {MAX_MANIFEST} bytes")
        found = digest_of(body)
        wanted = self.reference.digest or (sent if DIGEST.fullmatch(sent) else found)
        if found != wanted:
            raise ModelUnavailable(f"{self.reference}: its manifest has {found}, not {wanted}")
        return found, body

    def fetch_blob(
        self, blob: Descriptor, target: Path, progress: Progress, halt: threading.Event
    ) -> Path:
        """Download a blob to `target`, and verify it; raises as `fetch`, which `halt` ends."""
        return fetch(
            f"{self.url}/blobs/{blob.digest}",
            target,
            sha256=blob.digest.removeprefix("sha256:"),
            echo=self.echo,
            progress=progress,
            retry=self._retry,
            connections=_CONNECTIONS,
            stop=halt,
            auth=self._auth,
            expected_size=blob.size,
        )

    def put_manifest(self, body: bytes) -> None:
        """Send a manifest under the reference's tag."""
        headers = {"Content-Type": IMAGE}

        def once() -> None:
            path = f"/manifests/{self.reference.tag}"
            with self.answer("PUT", path, (201, 202), content=body, headers=headers):
                pass

        self.backoff().retried(once)

    def _problem(self, response: httpx.Response) -> Exception:
        status, said = response.status_code, _words(response)
        text = f"HTTP {status} {response.reason_phrase}".rstrip() + (f": {said}" if said else "")
        if is_transient(status):
            return TransientError(text, retry_after(response.headers.get("retry-after")))
        hint = ""
        if status in (401, 403):
            why = f"{self._auth.problem}; " if self._auth.problem else ""
            hint = f": {why}log in with docker login {self.reference.host}, or podman login"
        elif status == 404:
            hint = ": there is no such repository, tag or digest, or it is private"
        return self._refused(f"{self.reference}: {text}{hint}")


def _body(response: httpx.Response, most: int) -> bytes | None:
    """The body, if it has at most so many bytes."""
    body = b""
    for chunk in response.iter_raw():
        body += chunk
        if len(body) > most:
            return None
    return body


def _words(response: httpx.Response) -> str:
    """What a registry says in its errors' JSON, if it is that."""
    try:
        body = _body(response, _MAX_ERROR) or b""
        errors = httpx.Response(200, content=body).json()["errors"]
        said = "; ".join(f"{one.get('code')} {one.get('message') or ''}".strip() for one in errors)
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError):
        return ""
    return re.sub(r"\s+", " ", printable(said))[:_SHOWN]
