"""An identity provider of this machine: keys that it publishes over HTTP, tokens that it signs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from http_replies import reply
from range_server import answering

DISCOVERY = "/.well-known/openid-configuration"
AUDIENCE = "cog-triton"
RSA = rsa.generate_private_key(65537, 2048)
CURVE = ec.generate_private_key(ec.SECP256R1())
EDWARDS = ed25519.Ed25519PrivateKey.generate()
KEYS: dict[str, Any] = {"RS256": RSA, "PS512": RSA, "ES256": CURVE, "EdDSA": EDWARDS}


def public_jwk(kid: str, algorithm: str, key: Any = None, **more: Any) -> dict[str, Any]:
    """What is published of a key."""
    of = jwt.get_algorithm_by_name(algorithm)
    held = json.loads(of.to_jwk((key or KEYS[algorithm]).public_key()))
    return {**held, "kid": kid, "alg": algorithm, "use": "sig", **more}


class TokenProvider:
    """`url` is the issuer; `asked` has the paths that were asked for, `broken` what is answered."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[str] = []
        self.broken: tuple[int, bytes] | None = None
        self.published = [public_jwk(name, name) for name in KEYS]

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Discovery and keys."""
        self.asked.append(request.path)
        if self.broken is not None:
            reply(request, *self.broken)
        elif request.path == DISCOVERY:
            found = {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}
            reply(request, 200, json.dumps(found).encode())
        else:
            reply(request, 200, json.dumps({"keys": self.published}).encode())

    def claims(self, **changed: Any) -> dict[str, Any]:
        """Those of a good token; None leaves one out."""
        now = int(time.time())
        held = {"iss": self.url, "aud": AUDIENCE, "sub": "a", "iat": now, "exp": now + 60}
        return {name: value for name, value in {**held, **changed}.items() if value is not None}

    def token(self, algorithm: str = "ES256", key: Any = None, **changed: Any) -> bytes:
        """A signed token; `kid` is the algorithm's name unless it is among the `changed`."""
        headers = {"kid": changed.pop("kid", algorithm), **changed.pop("headers", {})}
        headers = {name: value for name, value in headers.items() if value is not None}
        signing = key or KEYS[algorithm]
        return jwt.encode(self.claims(**changed), signing, algorithm, headers).encode()


@contextmanager
def serving_tokens() -> Iterator[TokenProvider]:
    """A provider for as long as the context lasts."""
    provider = TokenProvider()
    with answering(provider.answer) as url:
        provider.url = url
        yield provider
