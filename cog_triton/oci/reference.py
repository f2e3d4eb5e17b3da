"""Reference of an engine in an OCI registry: registry, repository, tag, digest."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace
from typing import Self

from cog_triton.errors import ModelUnavailable
from cog_triton.system.redaction import redact_address

SCHEME = "oci://"
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*"
_WHOLE = re.compile(
    r"(?P<host>(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\])(?::\d{1,5})?)"
    rf"/(?P<repository>{_NAME}(?:/{_NAME})*)"
    rf"(?::(?P<tag>\w[\w.-]{{0,127}}))?(?:@(?P<digest>{DIGEST.pattern}))?",
    re.ASCII,
)
_HUB, _HUB_API = "docker.io", "registry-1.docker.io"
_RULE = "must be [oci://]REGISTRY/REPOSITORY[:TAG][@sha256:DIGEST], as ghcr.io/me/llm:v1"


def is_oci(text: str) -> bool:
    """Whether `text` begins with ``oci://``."""
    return text.startswith(SCHEME)


@dataclass(frozen=True)
class Reference:
    """Name of a manifest; without a digest it is what the `tag` is now."""

    host: str
    repository: str
    tag: str | None
    digest: str | None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a reference, with ``oci://`` or without; the tag's default is ``latest``.

        The registry is never guessed: ``me/llm`` is none of Docker Hub's.

        Raises:
            ModelUnavailable: not a reference; says the rule, and nothing of a password.
        """
        match = _WHOLE.fullmatch(text.removeprefix(SCHEME))
        host = match["host"] if match else ""
        if match is None or not (set(".:[") & set(host) or host == "localhost"):
            shown = redact_address(SCHEME + text.removeprefix(SCHEME)).removeprefix(SCHEME)
            raise ModelUnavailable(f"{shown[:200]!r}: {_RULE}")
        tag = match["tag"] or (None if match["digest"] else "latest")
        return cls(host, match["repository"], tag, match["digest"])

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"{SCHEME}{self.host}/{self.repository}{tag}{digest}"

    def pinned(self, digest: str) -> Self:
        """The same with `digest`."""
        return replace(self, digest=digest)

    def url(self, plain_http: bool) -> str:
        """URL of the repository's API; plain HTTP for loopback, else only with `plain_http`."""
        scheme = "http" if plain_http or is_loopback(self.host) else "https"
        api = _HUB_API if self.host == _HUB else self.host
        return f"{scheme}://{api}/v2/{self.repository}"


def is_loopback(host: str) -> bool:
    """Whether `host`, with a port or not, is this machine."""
    name = re.sub(r":\d+$", "", host)
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return name == "localhost"
