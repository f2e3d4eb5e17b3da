"""Redaction of secrets: in URLs for logs and errors, in the environment of other processes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from urllib.parse import urlsplit

SERVER_KEYS = frozenset({"COG_TRITON_API_KEY", "OPENAI_API_KEY", "WEBHOOK_AUTH_TOKEN"})
"""Keys of our own server, for the processes that answer clients or post webhooks."""
FRONT_VARIABLES = frozenset(
    {"COG_TRITON_API_KEY", "OPENAI_API_KEY", "COG_TRITON_KEYS", "TLS_CERT_FILE", "TLS_KEY_FILE"}
)
"""Variables that only the server needs, of all processes."""
KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})
"""Headers in which clients send such a key; the front does not pass them on."""
HUB_TOKENS = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})
"""For what downloads from the Hugging Face hub."""
_URLS = frozenset({"COG_WEIGHTS"})
"""URLs that may be signed, or have a password."""
_SECRET = re.compile(
    r"(.*_)?(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|CONNECTION_STRING"
    r"|(API|ACCESS|SECRET|PRIVATE|ACCOUNT|STORAGE|ENCRYPTION)_?KEY(_ID)?)(_FILE)?",
    re.IGNORECASE,
)


def sent_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The key of ``Authorization: Bearer KEY``, else of ``x-api-key``, which is Anthropic's.

    The first header of a name counts; empty if there is no key.
    """
    found = {name: value for name, value in reversed(list(headers)) if name in KEY_HEADERS}
    scheme, _, key = found.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else found.get(b"x-api-key", b"").strip()


def is_secret(name: str) -> bool:
    """Whether the variable `name` is taken for a secret: by name, as those of cloud providers."""
    return name in SERVER_KEYS | HUB_TOKENS | _URLS or _SECRET.fullmatch(name) is not None


def without_secrets(environment: Mapping[str, str], keep: Collection[str] = ()) -> dict[str, str]:
    """`environment` without the variables that hold secrets, but for those to `keep`."""
    return {k: v for k, v in environment.items() if k in keep or not is_secret(k)}


def redact_url(url: str) -> str:
    """`url` without its possible secrets: user, password, query and fragment.

    Raises:
        ValueError: not a URL.
    """
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=host, query="", fragment="").geturl()


def redact_address(address: str) -> str:
    """A path as it is, a URL of any scheme redacted; never fails.

    Of a URL that cannot be taken apart, such as one whose password has a bare ``/`` or ``#``, only
    the scheme is left.
    """
    scheme, mark, _ = address.partition("://")
    if not mark:
        return address
    try:
        _ = urlsplit(address).port  # the part of such a password that precedes the / or #
        redacted = redact_url(address)
    except ValueError:
        redacted = ""
    return redacted if redacted and "@" not in redacted else f"{scheme.rpartition('@')[2]}://..."
