"""An environment for tests that holds nothing of the caller's but what finds programs and files.

Settings, proxies, tokens, locales and the caches and configuration below the caller's home would
change what is tested. What a test needs beside these it sets itself.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

KEPT = frozenset(
    {
        *("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "TMPDIR", "TERM", "USER", "LOGNAME"),
        *("CI", "AIPERF", "UPDATE_GOLDEN"),
    }
)
KEPT_PREFIXES = ("PYTEST_",)
HOME = Path(__file__).parents[1] / ".work" / "test" / "home"
CERTIFICATE = Path(__file__).with_name("one_certificate.pem")
"""The only authority that the tests' HTTPS clients trust: each httpx client reads the whole bundle
of authorities, for 15 to 40 ms, and no test speaks to a server of the outside."""


def clean(environment: MutableMapping[str, str] = os.environ, home: Path = HOME) -> None:
    """Remove all variables but those of `KEPT`; set the home directory and `CERTIFICATE`."""
    for name in [*environment]:
        if name not in KEPT and not name.startswith(KEPT_PREFIXES):
            del environment[name]
    home.mkdir(parents=True, exist_ok=True)
    environment["HOME"] = str(home)
    environment["SSL_CERT_FILE"] = str(CERTIFICATE)
