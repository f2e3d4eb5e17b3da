"""Secrets in the environment: which variables hold one, so that processes get only their own."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

SERVER_KEYS = frozenset({"COG_TRITON_API_KEY", "OPENAI_API_KEY", "WEBHOOK_AUTH_TOKEN"})
"""Keys of our own server, for the processes that answer clients or post webhooks."""
HUB_TOKENS = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})
"""For what downloads from the Hugging Face hub."""
_URLS = frozenset({"COG_WEIGHTS"})
"""URLs that may be signed, or have a password."""
_SECRET = re.compile(
    r"(.*_)?(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|CONNECTION_STRING"
    r"|(API|ACCESS|SECRET|PRIVATE|ACCOUNT|STORAGE|ENCRYPTION)_?KEY(_ID)?)(_FILE)?",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Whether the variable `name` is taken for a secret: by name, as those of cloud providers."""
    return name in SERVER_KEYS | HUB_TOKENS | _URLS or _SECRET.fullmatch(name) is not None


def without_secrets(environment: Mapping[str, str], keep: Collection[str] = ()) -> dict[str, str]:
    """`environment` without the variables that hold secrets, but for those to `keep`."""
    return {k: v for k, v in environment.items() if k in keep or not is_secret(k)}
