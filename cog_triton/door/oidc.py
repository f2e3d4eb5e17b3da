"""OpenID Connect: JSON Web Tokens of one issuer, verified by its published keys (JWKS).

A token says which tenant it is of; what that may do, a key of the keyring says. Signatures are of
public keys alone, and nothing in a token says where its key is.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import jwt

from cog_triton.door.access import is_loopback
from cog_triton.door.message import Bearer
from cog_triton.errors import InvalidArgument, TritonUnavailable, Unauthorized
from cog_triton.settings import Settings

_ALGORITHMS = frozenset(
    "RS256 RS384 RS512 PS256 PS384 PS512 ES256 ES384 ES512 EdDSA".split()  # noqa: SIM905
)
_REQUIRED = ("exp", "iss", "aud")
_MOST_TOKEN = 8 << 10
_MOST_NAME = 256
_MOST_ANSWER = 256 << 10
_MOST_KEYS = 64
_MOST_WAITING = 64
_FETCH_S = 5.0
_FRESH_S = 300.0
_AGAIN_S = 10.0
_STALE_S = 3600.0
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
_DISCOVERY = "/.well-known/openid-configuration"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rules:
    """What a token must say; `jwks_url` None is what the issuer's discovery document says."""

    issuer: str
    audiences: tuple[str, ...]
    jwks_url: str | None
    claim: str
    leeway_s: float

    @classmethod
    def of(cls, settings: Settings, issuer: str) -> Rules:
        """Those of the settings for an issuer; raises E1005 where they are wrong."""
        if settings.cog_triton_keys is None:
            raise InvalidArgument(
                "OIDC_ISSUER: needs COG_TRITON_KEYS, which says what a tenant may do"
            )
        found = (settings.oidc_audience or "").split(",")
        audiences = tuple(one.strip() for one in found if one.strip())
        if not audiences:
            raise InvalidArgument("OIDC_AUDIENCE: needed with OIDC_ISSUER: whom tokens are for")
        _require_private("OIDC_ISSUER", issuer)
        if settings.oidc_jwks_url is not None:
            _require_private("OIDC_JWKS_URL", settings.oidc_jwks_url)
        claim, leeway_s = settings.oidc_tenant_claim, settings.oidc_leeway
        return cls(issuer, audiences, settings.oidc_jwks_url, claim, leeway_s)


def _require_private(name: str, url: str) -> None:
    """Raise E1005 unless nobody on the way can change what the URL answers."""
    try:
        parts = urlsplit(url)
        host, bare = parts.hostname or "", not (parts.username or parts.fragment)
    except ValueError:
        host, bare = "", False
    scheme = url.partition("://")[0]
    if not host or not bare or not (scheme == "https" or (scheme == "http" and is_loopback(host))):
        raise InvalidArgument(
            f"{name}={url[:200]!r}: must be https://HOST/..., or http:// of this machine, without"
            " user and fragment"
        )


class IssuerKeys(jwt.PyJWKClient):
    """Public keys of an issuer, in a cache of five minutes; an issuer that fails is left alone.

    While it fails, keys of the last hour go on. One thread at a time fetches; a key that is not
    there has them fetched once in ten seconds.
    """

    def __init__(self, rules: Rules) -> None:
        url = rules.jwks_url or rules.issuer.rstrip("/") + _DISCOVERY
        super().__init__(url, lifespan=_FRESH_S, cooldown_duration=_AGAIN_S)
        self._rules = rules
        self._held: jwt.PyJWKSet | None = None
        self._held_at = self._failed_at = -float("inf")

    def known(self, kid: str) -> jwt.PyJWK | None:
        """The key of an id, if it is in the cache; does not block."""
        cached = self.jwk_set_cache.get() if self.jwk_set_cache else None
        return self.match_kid(cached.keys, kid) if cached else None

    def fetch_data(self) -> Any:
        """The keys, for the cache of the client; blocks. Raises PyJWTError where there are none."""
        now = time.monotonic()
        if now - self._failed_at > _AGAIN_S:
            try:
                self._held, self._held_at = self._read(), now
                self._last_successful_fetch = now
                return self._held
            except (httpx.HTTPError, jwt.PyJWTError, *_MALFORMED) as error:
                self._failed_at = time.monotonic()
                what = str(error)[:200] or type(error).__name__
                _LOG.error("keys of %s cannot be had: %s", self._rules.issuer, what)
        if self._held is None or now - self._held_at > _STALE_S:
            raise jwt.PyJWKClientConnectionError("the issuer's keys cannot be had")
        return self._held

    def _read(self) -> jwt.PyJWKSet:
        url = self._rules.jwks_url
        if url is None:
            found = _get(self.uri)
            url = found.get("jwks_uri")
            if found.get("issuer") != self._rules.issuer or not isinstance(url, str):
                raise ValueError(f"{self.uri}: is not of this issuer, or has no jwks_uri")
            _require_own(url)
        listed = _get(url).get("keys")
        if not isinstance(listed, list) or len(listed) > _MOST_KEYS:
            raise ValueError(f"{url}: must have a list of at most {_MOST_KEYS} keys")
        read = jwt.PyJWKSet(listed)
        read.keys = [
            key
            for key in read.keys
            if key.algorithm_name in _ALGORITHMS and key.public_key_use in ("sig", None)
        ]
        if not read.keys:
            raise ValueError(f"{url}: has no public key that verifies")
        return read


def _require_own(url: str) -> None:
    try:
        _require_private("jwks_uri", url)
    except InvalidArgument as error:
        raise ValueError(error.detail) from None


def _get(url: str) -> dict[str, Any]:
    """A JSON object; raises httpx.HTTPError, or ValueError for one that is too long or slow."""
    deadline = time.monotonic() + _FETCH_S
    body = bytearray()
    with httpx.stream(
        "GET", url, timeout=_FETCH_S, headers={"accept-encoding": "identity"}
    ) as answer:
        if answer.status_code != 200:
            raise ValueError(f"{url}: answered {answer.status_code}")
        for chunk in answer.iter_raw():
            body += chunk
            if len(body) > _MOST_ANSWER or time.monotonic() > deadline:
                raise ValueError(f"{url}: more than {_MOST_ANSWER} bytes, or {_FETCH_S:g} s")
    found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError(f"{url}: must be a JSON object")
    return found


class TokenIssuer:
    """The issuer whose tokens the door takes."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._keys = IssuerKeys(rules)
        self._thread = ThreadPoolExecutor(1, "oidc")
        self._waiting = 0

    def close(self) -> None:
        """Wait for no fetch that is under way."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def read(self, token: bytes) -> Bearer:
        """The tenant that a token names, or why it is refused; never raises."""
        try:
            return Bearer(tenant=self._tenant_of(token, await self._key_of(token)))
        except (Unauthorized, TritonUnavailable) as error:
            return Bearer(error=error)
        except jwt.PyJWKClientConnectionError as error:
            return Bearer(error=TritonUnavailable(f"{error}; try again"))
        except jwt.PyJWTError as error:
            return Bearer(error=Unauthorized(f"the token is refused: {str(error)[:200]}"))
        except _MALFORMED:
            return Bearer(error=Unauthorized("the token is no JSON Web Token"))

    async def _key_of(self, token: bytes) -> jwt.PyJWK:
        if len(token) > _MOST_TOKEN:
            raise Unauthorized(f"the token has more than {_MOST_TOKEN} bytes")
        header = jwt.get_unverified_header(token)
        kid = header.get("kid")
        if header.get("alg") not in _ALGORITHMS or "crit" in header:
            raise Unauthorized("the token's algorithm is none that is taken, or it has crit")
        if not isinstance(kid, str) or len(kid) > _MOST_NAME:
            raise Unauthorized("the token names no key (kid)")
        if (key := self._keys.known(kid)) is not None:
            return key
        if self._waiting >= _MOST_WAITING:
            raise TritonUnavailable("the issuer's keys are being fetched; try again")
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._keys.get_signing_key, kid)
        finally:
            self._waiting -= 1

    def _tenant_of(self, token: bytes, key: jwt.PyJWK) -> str:
        rules = self._rules
        claims = jwt.decode(
            token,
            key,
            algorithms=[key.algorithm_name],
            audience=rules.audiences,
            issuer=rules.issuer,
            leeway=rules.leeway_s,
            options={"require": [*_REQUIRED], "enforce_minimum_key_length": True},
        )
        name = claims.get(rules.claim)
        if not isinstance(name, str) or not 0 < len(name) <= _MOST_NAME:
            raise Unauthorized(f"the token has no tenant in {rules.claim} (OIDC_TENANT_CLAIM)")
        return name
