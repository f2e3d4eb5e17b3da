"""Config source: reads a build config from a path, an http(s), file or data URL, or the text."""

from __future__ import annotations

import base64
import time
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

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
    content = _read(address, name)
    if len(content) > MAX_BYTES:
        raise BuildConfigInvalid(f"config={name!r}: is longer than {MAX_BYTES} bytes")
    try:
        return content.decode("utf-8"), name
    except UnicodeDecodeError as error:
        raise BuildConfigInvalid(f"config={name!r}: is not UTF-8 text: {error}") from None


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


def _read(address: str, name: str) -> bytes:
    """The content, or its first bytes if it is longer than `MAX_BYTES`."""
    if "\n" in address:
        return address.encode("utf-8", "surrogatepass")
    if address.startswith("data:"):
        return _decode(address)
    if "://" not in address:
        return _read_file(Path(address), name)
    url = urlsplit(address)
    if url.scheme in ("http", "https"):
        return _download(address, name)
    if url.scheme == "file" and url.netloc in ("", "localhost"):
        return _read_file(Path(unquote(url.path)), name)
    raise BuildConfigInvalid(
        f"config={name!r}: must be a path, or an http(s)://, file:///path or data: URL"
    )


def _decode(address: str) -> bytes:
    kind, comma, data = address.rstrip().removeprefix("data:").partition(",")
    if not comma:
        raise BuildConfigInvalid("config: not a data URL: it has no comma")
    content = unquote_to_bytes(data)
    try:
        return base64.decodebytes(content) if kind.endswith(";base64") else content
    except ValueError as error:
        raise BuildConfigInvalid(f"config: not a data URL: {error}") from None


def _read_file(path: Path, name: str) -> bytes:
    try:
        if not path.is_file():  # opening a pipe would wait for its writer
            raise BuildConfigInvalid(f"config={name!r}: no such file")
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise BuildConfigInvalid(f"config={name!r}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # NUL in the path
        raise BuildConfigInvalid(f"config={name!r}: {error}") from None


def _download(address: str, name: str) -> bytes:
    content, deadline = b"", time.monotonic() + _TIMEOUT_S
    try:
        with httpx.stream("GET", address, follow_redirects=True, timeout=_TIMEOUT_S) as response:
            if response.status_code != 200:
                status = f"{response.status_code} {response.reason_phrase}"
                raise BuildConfigInvalid(f"config={name!r}: HTTP {status}")
            for chunk in response.iter_bytes():
                content += chunk
                if len(content) > MAX_BYTES:
                    break
                if time.monotonic() > deadline:
                    raise BuildConfigInvalid(f"config={name!r}: is not here after {_TIMEOUT_S:g} s")
    except httpx.InvalidURL:  # its text may hold a password
        raise BuildConfigInvalid(f"config={name!r}: not a valid URL") from None
    except httpx.HTTPError as error:
        text = str(error) or type(error).__name__
        raise BuildConfigInvalid(f"config={name!r}: {text}") from None
    return content
