"""Config source: reads a build config from a path, an http(s), file or data URL, or the text."""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import DataHandler, Request

import httpx

from cog_triton.errors import BuildConfigInvalid
from cog_triton.system.redaction import redact_url

MAX_BYTES = 1 << 20
_TIMEOUT_S = 30.0
_SHOWN_LENGTH = 200


def fetch(address: str) -> tuple[str, str]:
    """Fetch the text at `address`; returns it and the name that errors may give it.

    Args:
        address: a path, or an ``http(s)://``, ``file:///path`` or ``data:`` URL, of UTF-8 text
            that is at most `MAX_BYTES` long; or, if it has more than one line, the text itself.

    Raises:
        BuildConfigInvalid: names the address, without its secrets, and the rule.
    """
    name = _shown_name(address)
    try:
        content = _read(address)
        if len(content) > MAX_BYTES:
            raise ValueError(f"is longer than {MAX_BYTES} bytes")
        return content.decode("utf-8"), name
    except UnicodeDecodeError as error:
        rule = f"is not UTF-8 text: {error}"
    except httpx.InvalidURL:  # its text may hold a password
        rule = "not a valid URL"
    except httpx.HTTPError as error:
        rule = str(error) or type(error).__name__
    except OSError as error:
        rule = f"cannot be read: {error.strerror or error}"
    except ValueError as error:
        rule = str(error)
    raise BuildConfigInvalid(f"config={name!r}: {rule}")


def _shown_name(address: str) -> str:
    if "\n" in address:
        return "the text"
    if address.startswith("data:"):
        return "the data URL"
    try:
        _ = urlsplit(address).port  # a password with a bare # or / in it ends up there
        return (redact_url(address) if "://" in address else address)[:_SHOWN_LENGTH]
    except ValueError:
        raise BuildConfigInvalid("config: not a URL") from None


def _read(address: str) -> bytes:
    """The content, or its first bytes if it is longer than `MAX_BYTES`."""
    if "\n" in address:
        return address.encode("utf-8", "surrogatepass")
    if address.startswith("data:"):
        try:
            return DataHandler().data_open(Request(address)).read()
        except ValueError as error:
            raise ValueError(f"not a data URL: {error}") from None
    url = urlsplit(address)
    if url.scheme in ("http", "https"):
        return _download(address)
    is_url = "://" in address
    if is_url and (url.scheme != "file" or url.netloc not in ("", "localhost")):
        raise ValueError("must be a path, or an http(s)://, file:///path or data: URL")
    path = Path(unquote(url.path) if is_url else address)
    if not path.is_file():  # opening a pipe would wait for its writer
        raise ValueError("no such file")
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def _download(address: str) -> bytes:
    content, deadline = b"", time.monotonic() + _TIMEOUT_S
    with httpx.stream("GET", address, follow_redirects=True, timeout=_TIMEOUT_S) as response:
        if response.status_code != 200:
            raise ValueError(f"HTTP {response.status_code} {response.reason_phrase}")
        for chunk in response.iter_bytes():
            content += chunk
            if len(content) > MAX_BYTES:
                break
            if time.monotonic() > deadline:
                raise ValueError(f"is not here after {_TIMEOUT_S:g} s")
    return content
