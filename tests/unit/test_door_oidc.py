"""Tokens of an identity provider: which are taken, whose they are, and where the keys come from."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_door import decided, gates, passed
from test_door_keyring import bearer, keyring, line
from token_issuer import (
    AUDIENCE,
    CURVE,
    DISCOVERY,
    KEYS,
    RSA,
    TokenProvider,
    public_jwk,
    serving_tokens,
)

from cog_triton.door import oidc
from cog_triton.door.access import Access
from cog_triton.door.message import Bearer
from cog_triton.door.oidc import Rules, TokenIssuer
from cog_triton.errors import InvalidArgument, TritonUnavailable, Unauthorized
from cog_triton.serving.tenants import HEADER
from cog_triton.settings import load_settings

CHAT = b'{"model":"m","messages":[]}'


@pytest.fixture
def provider() -> Iterator[TokenProvider]:
    with serving_tokens() as made:
        yield made


def rules(provider: TokenProvider, **changed: Any) -> Rules:
    given = {"issuer": provider.url, "audiences": (AUDIENCE,), "jwks_url": None}
    return Rules(**{**given, "claim": "sub", "leeway_s": 5.0, **changed})


def read(issuer: TokenIssuer, *tokens: bytes) -> list[Bearer]:
    async def main() -> list[Bearer]:
        return [await issuer.read(token) for token in tokens]

    return asyncio.run(main())


def said(found: Bearer) -> str:
    assert isinstance(found.error, Unauthorized), found
    return found.error.detail


@pytest.fixture
def issuer(provider: TokenProvider) -> Iterator[TokenIssuer]:
    made = TokenIssuer(rules(provider))
    yield made
    made.close()


@pytest.mark.parametrize("algorithm", KEYS)
def test_a_token_of_the_issuer_names_a_tenant(
    provider: TokenProvider, issuer: TokenIssuer, algorithm: str
) -> None:
    assert read(issuer, provider.token(algorithm)) == [Bearer("a")]
    assert read(issuer, provider.token(algorithm, aud=["x", AUDIENCE])) == [Bearer("a")]
    assert provider.asked == [DISCOVERY, "/keys"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"iss": "https://other.example"}, "Invalid issuer"),
        ({"iss": None}, "iss"),
        ({"aud": "other"}, "Audience doesn't match"),
        ({"aud": None}, "aud"),
        ({"exp": None}, "exp"),
        ({"exp": int(time.time()) - 60}, "expired"),
        ({"nbf": int(time.time()) + 30 * 86_400}, "not yet valid"),
        ({"sub": None}, "no tenant in sub"),
        ({"sub": ""}, "no tenant in sub"),
        ({"sub": "x" * 257}, "no tenant in sub"),
        ({"kid": None}, "names no key"),
        ({"kid": "x" * 300}, "names no key"),
        ({"kid": "other"}, "signing key that matches"),
        ({"kid": "RS256"}, "alg value is not allowed"),
        ({"headers": {"crit": ["exp"], "exp": 1}}, "crit"),
        ({"pad": "x" * 9000}, "more than 8192 bytes"),
    ],
)
def test_what_a_token_must_say(
    provider: TokenProvider, issuer: TokenIssuer, changed: dict[str, Any], words: str
) -> None:
    (found,) = read(issuer, provider.token(**changed))
    assert words in said(found)


def test_clocks_may_differ_by_the_leeway(provider: TokenProvider, issuer: TokenIssuer) -> None:
    late = provider.token(exp=int(time.time()) - 2)
    assert read(issuer, late) == [Bearer("a")]
    (found,) = read(TokenIssuer(rules(provider, leeway_s=0.0)), late)
    assert "expired" in said(found)


def unsigned(provider: TokenProvider, header: dict[str, Any], signature: bytes = b"") -> bytes:
    parts = (json.dumps(header).encode(), json.dumps(provider.claims()).encode(), signature)
    return b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)


def test_only_signatures_of_public_keys_count(provider: TokenProvider, issuer: TokenIssuer) -> None:
    pem = RSA.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    provider.published.append(
        {"kty": "oct", "kid": "shared", "k": base64.urlsafe_b64encode(b"k" * 64).decode()}
    )
    stranger = ec.generate_private_key(ec.SECP256R1())
    own = public_jwk("ES256", "ES256", stranger)
    forged = [
        unsigned(provider, {"alg": "none", "kid": "RS256"}),
        unsigned(provider, {"alg": "None", "kid": "RS256"}),
        unsigned(provider, {"kid": "RS256"}),
        jwt.encode(provider.claims(), "k" * 64, "HS256", {"kid": "shared"}).encode(),
        hmac_with(provider, pem),
        provider.token(key=stranger),
        provider.token(key=stranger, headers={"jwk": own, "jku": f"{provider.url}/keys"}),
    ]
    for found in read(issuer, *forged):
        said(found)
    assert read(issuer, provider.token()) == [Bearer("a")]


def hmac_with(provider: TokenProvider, key: bytes) -> bytes:
    """A token by HS256 whose key is the public one, which PyJWT itself would not make."""
    bare = unsigned(provider, {"alg": "HS256", "kid": "RS256"}).rpartition(b".")[0]
    signature = hmac.new(key, bare, hashlib.sha256).digest()
    return bare + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")


def test_a_short_key_is_refused(provider: TokenProvider, issuer: TokenIssuer) -> None:
    short = rsa.generate_private_key(65537, 1024)
    provider.published.append(public_jwk("short", "RS256", short))
    with pytest.warns(jwt.InsecureKeyLengthWarning):
        token = provider.token("RS256", short, kid="short")
    (found,) = read(issuer, token)
    assert "bits" in said(found)


def test_new_keys_are_seen_and_unknown_ones_are_asked_for_once(
    provider: TokenProvider, issuer: TokenIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = ec.generate_private_key(ec.SECP256R1())
    rotated = provider.token(key=fresh, kid="new")
    read(issuer, provider.token())
    for found in read(issuer, *[provider.token(kid=f"guess-{n}") for n in range(20)], rotated):
        said(found)
    assert provider.asked == [DISCOVERY, "/keys"]
    provider.published.append(public_jwk("new", "ES256", fresh))
    issuer._keys._last_successful_fetch = time.monotonic() - oidc._AGAIN_S - 1
    assert read(issuer, rotated) == [Bearer("a")]
    assert len(provider.asked) == 4


@pytest.mark.parametrize(
    "broken",
    [
        (500, b""),
        (302, b""),
        (200, b"{"),
        (200, b"[]"),
        (200, b'{"keys": []}'),
        (200, b'{"keys": [{"kty": 5}, 7, {"kty": "RSA", "n": [], "e": {}}]}'),
        (200, b'{"keys": [' + b"{}," * 70 + b"{}]}"),
        (200, b'{"keys": "' + b"x" * (oidc._MOST_ANSWER + 1) + b'"}'),
        (200, b"[" * 200_000),
    ],
    ids=lambda broken: broken[1][:20].decode(),
)
def test_an_issuer_that_fails_is_left_alone_and_its_keys_go_on(
    provider: TokenProvider, broken: tuple[int, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    issuer = TokenIssuer(rules(provider, jwks_url=f"{provider.url}/keys"))
    good, provider.broken = provider.token(), broken
    first, second = read(issuer, good, good)
    for found in (first, second):
        assert isinstance(found.error, TritonUnavailable)
    assert provider.asked == ["/keys"]  # not for each request
    assert "keys of" in caplog.text
    provider.broken = None
    issuer._keys._failed_at = -float("inf")
    assert read(issuer, good) == [Bearer("a")]
    provider.broken = broken
    issuer._keys.jwk_set_cache.put(None)
    assert read(issuer, good) == [Bearer("a")]
    issuer._keys.jwk_set_cache.put(None)
    issuer._keys._held_at -= oidc._STALE_S + 1
    (found,) = read(issuer, good)
    assert isinstance(found.error, TritonUnavailable)
    issuer.close()


def test_an_issuer_that_hangs_holds_up_no_more_than_so_many(provider: TokenProvider) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        url = f"http://127.0.0.1:{hangs.getsockname()[1]}/keys"
        issuer = TokenIssuer(rules(provider, jwks_url=url))

        async def main() -> list[Bearer]:
            token = provider.token()
            asked = [asyncio.ensure_future(issuer.read(token)) for _ in range(oidc._MOST_WAITING)]
            await asyncio.sleep(0)
            over = [await issuer.read(token) for _ in range(3)]
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            return over

        for found in asyncio.run(main()):
            assert isinstance(found.error, TritonUnavailable)
        accepted, _ = hangs.accept()
        accepted.close()
        issuer.close()


def test_discovery_must_be_of_the_issuer_and_its_keys_private(
    provider: TokenProvider, caplog: pytest.LogCaptureFixture
) -> None:
    for body, words in (
        ({"issuer": "https://other", "jwks_uri": f"{provider.url}/keys"}, "is not of this issuer"),
        ({"issuer": provider.url, "jwks_uri": "http://192.0.2.1/keys"}, "must be https://"),
        ({"issuer": provider.url, "jwks_uri": "file:///etc/passwd"}, "must be https://"),
        ({"issuer": provider.url}, "has no jwks_uri"),
    ):
        provider.broken = (200, json.dumps(body).encode())
        (found,) = read(TokenIssuer(rules(provider)), provider.token())
        assert isinstance(found.error, TritonUnavailable)
        assert words in caplog.text


PLACES = st.integers(0, 2**31)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.sampled_from(sorted(KEYS)), st.lists(st.tuples(PLACES, st.integers(0, 255)), min_size=1))
def test_no_token_that_was_changed_is_taken(
    provider: TokenProvider, issuer: TokenIssuer, algorithm: str, changes: list[tuple[int, int]]
) -> None:
    token = provider.token(algorithm)
    changed = bytearray(token)
    for place, byte in changes:
        changed[place % len(changed)] = byte
    (found,) = read(issuer, bytes(changed))
    if decoded_parts(bytes(changed)) != decoded_parts(token):
        assert found.tenant == ""
        assert found.error is not None


def decoded_parts(token: bytes) -> object:
    """What a token's parts are: the last bits of a part's last letter may be of no meaning."""
    try:
        header, claims, signature = token.split(b".")
        return header, claims, base64.urlsafe_b64decode(signature + b"=" * (-len(signature) % 4))
    except ValueError:
        return token


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
)
NAMES = st.sampled_from(["alg", "kid", "typ", "crit", "b64", "iss", "aud", "exp", "nbf", "iat"])
OBJECTS = st.dictionaries(NAMES | st.text(max_size=5), JSON | st.sampled_from(["ES256", "none"]))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=300) | st.just(b"." * 9000), OBJECTS, st.dictionaries(NAMES, JSON))
def test_nothing_that_is_sent_ends_the_door(
    provider: TokenProvider,
    issuer: TokenIssuer,
    noise: bytes,
    header: dict[str, Any],
    claims: dict[str, Any],
) -> None:
    odd = json.dumps(header).encode()
    made = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in (odd, noise, noise))
    signed = jwt.api_jws.encode(
        json.dumps(claims).encode(), CURVE, "ES256", {"kid": "ES256"}
    ).encode()
    for found in read(issuer, noise, made, signed):
        assert isinstance(found.error, Unauthorized)


def door(tmp_path: Path, issuer: TokenIssuer, *lines: str, api_key: str | None = None) -> Any:
    ring = keyring(tmp_path, *lines, api_key=api_key)
    return gates(access=Access(api_key, False, ring, issuer=issuer))


def test_a_tenants_key_says_what_its_tokens_may_do(
    tmp_path: Path, provider: TokenProvider, issuer: TokenIssuer
) -> None:
    past = {"expires": "2020-01-01T00:00:00Z"}
    lines = (line("a", "k0", weight=9, **past), line("a", "k1", weight=2), line("b", "k2", **past))
    made = door(tmp_path, issuer, *lines, api_key="own")["openai"]
    token = bearer(provider.token().decode())
    forward = passed(made, "POST", "/v1/chat/completions", CHAT, token)
    assert json.loads(dict(forward.headers)[HEADER.encode()]) == {"name": "a", "weight": 2.0}
    assert b"authorization" not in dict(forward.headers)
    # Of an expired key, of none, and of COG_TRITON_API_KEY's tenant, which may do everything.
    for name in ("b", "c", "default"):
        other = bearer(provider.token(sub=name).decode())
        answer = decided(made, "POST", "/v1/chat/completions", CHAT, other)
        assert (answer.status, b"the token's tenant" in answer.body) == (403, True)
    assert passed(made, "POST", "/v1/chat/completions", CHAT, bearer("k1"))


@pytest.mark.parametrize(
    ("port", "path", "shape"),
    [
        ("openai", "/v1/chat/completions", ("error", "message")),
        ("openai", "/v1/messages", ("error", "message")),
        ("cog", "/predictions", ("error",)),
        ("triton", "/v2/models/m/generate", ("error",)),
    ],
)
def test_a_wrong_token_is_401_in_the_shape_of_each_api(
    tmp_path: Path,
    provider: TokenProvider,
    issuer: TokenIssuer,
    port: str,
    path: str,
    shape: tuple[str, ...],
) -> None:
    made = door(tmp_path, issuer, line("a", "k", apis=["openai", "predictions", "triton"]))
    expired = bearer(provider.token(exp=1).decode())
    answer = decided(made[port], "POST", path, b"{}", expired)
    assert answer.status == 401
    found = json.loads(answer.body)
    for name in shape:
        found = found[name]
    assert found.startswith("E1007 Unauthorized: the token is refused: Signature has expired")


def test_an_issuer_that_fails_is_503_and_no_wrong_guess(
    tmp_path: Path, provider: TokenProvider, issuer: TokenIssuer
) -> None:
    made = door(tmp_path, issuer, line("a", "k"))["openai"]
    provider.broken = (500, b"")
    token = bearer(provider.token().decode())
    for _ in range(70):
        assert decided(made, "POST", "/v1/completions", b"{}", token).status == 503
    assert passed(made, "POST", "/v1/completions", CHAT, bearer("k"))


def test_wrong_tokens_are_guesses(
    tmp_path: Path, provider: TokenProvider, issuer: TokenIssuer
) -> None:
    made = door(tmp_path, issuer, line("a", "k"))["openai"]
    wrong = bearer(provider.token(aud="other").decode())
    found = {decided(made, "POST", "/v1/completions", b"{}", wrong).status for _ in range(70)}
    assert found == {401, 429}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"oidc_audience": "x"}, "OIDC_ISSUER: needs COG_TRITON_KEYS"),
        ({"cog_triton_keys": "keys"}, "OIDC_AUDIENCE: needed"),
        ({"cog_triton_keys": "keys", "oidc_audience": " , "}, "OIDC_AUDIENCE: needed"),
    ],
)
def test_settings_that_lack_something_are_refused(given: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Rules.of(load_settings(**given), "https://id.example")


@pytest.mark.parametrize(
    "url",
    [
        "id.example",
        "http://id.example",
        "https://u:p@id.example",
        "https://id.example#x",
        "https://[",
    ],
)
def test_an_address_that_others_could_answer_for_is_refused(url: str) -> None:
    given: dict[str, Any] = {"cog_triton_keys": "keys", "oidc_audience": "x"}
    for issuer, more in ((url, {}), ("https://id.example", {"oidc_jwks_url": url})):
        with pytest.raises(InvalidArgument, match="must be https://HOST"):
            Rules.of(load_settings(**given, **more), issuer)
