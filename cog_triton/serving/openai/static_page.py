"""Static page of the OpenAI port, with its Content Security Policy.

The page is one file without anything secret in it; what it shows, it asks the API for, with the
key that its user gives. Its policy lets run only the script that is in it, known by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

PATH = "/"
CONTENT_TYPE = "text/html; charset=utf-8"
PAGE = (Path(__file__).parent / "page.html").read_bytes()


def _policy() -> str:
    hashes = {}
    for tag in ("script", "style"):
        (inline,) = re.findall(rb"<%b>(.*?)</%b>" % (tag.encode(), tag.encode()), PAGE, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline).digest()).decode()
        hashes[tag] = f"'sha256-{digest}'"
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {hashes['script']}",
            f"style-src {hashes['style']}",
            "connect-src 'self'",
            "img-src data:",  # its icon
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": _policy(),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
