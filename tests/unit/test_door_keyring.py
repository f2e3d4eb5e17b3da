"""Keys of tenants: the file, its hashes, its reload, who may pass, and what a worker is told."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_door import answered, gates, passed, status

from cog_triton.door.access import Access, GuessLimit, network_of
from cog_triton.door.keyring import MOST_BYTES, Key, Keyring, parse_keys, read_keys, sha256_of
from cog_triton.door.message import Refused
from cog_triton.errors import CogTritonError, InvalidArgument, Unauthorized
from cog_triton.serving.tenants import HEADER, Tenant

ADMIN = ["predictions", "openai", "triton", "metrics", "adapters", "admin"]
CHAT = b'{"model":"m","messages":[]}'


def line(name: str, key: str, **values: Any) -> str:
    return json.dumps({"name": name, "sha256": sha256_of(key.encode()), **values})


def keyring(tmp_path: Path, *lines: str, api_key: str | None = None) -> Keyring:
    file = tmp_path / "keys"
    file.write_text("\n".join(["# keys", "", *lines]))
    return Keyring(file, api_key)


def bearer(key: str) -> tuple[bytes, bytes]:
    return b"authorization", f"Bearer {key}".encode()


def locked(tmp_path: Path, *lines: str, api_key: str | None = None) -> dict[str, Any]:
    ring = keyring(tmp_path, *lines, api_key=api_key)
    return gates(access=Access(api_key, True, ring))


def test_a_key_is_found_by_its_hash_and_no_file_has_it(tmp_path: Path) -> None:
    ring = keyring(tmp_path, line("a", "ka", weight=2), line("b", "kb"), api_key="own")
    assert (ring.find(b"ka") or Key).name == "a"
    assert (ring.find(b"own") or Key).name == "default"
    assert ring.find(b"kc") is ring.find(b"") is None
    assert "ka" not in (tmp_path / "keys").read_text()


def test_a_directory_of_files_is_read_and_hidden_files_are_not(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(line("a", "ka"))
    (tmp_path / "b").write_text(line("b", "kb"))
    (tmp_path / "..data").mkdir()
    assert [key.name for key in read_keys(tmp_path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "keys:2: must be a JSON object on one line"),
        ("[" * 100_000, "keys:2: must be a JSON object on one line"),
        ("[]", "keys:2: line: "),
        ('{"name": "a"}', "keys:2: sha256: Field required"),
        (line("a b", "k"), "keys:2: name: "),
        (line("a", "k", weight=0), "keys:2: weight: Input should be greater than or equal to 0.01"),
        (line("a", "k", weight=float("nan")), "keys:2: weight: "),
        (line("a", "k", priority=11), "keys:2: priority: "),
        (line("a", "k", priority=True), "keys:2: priority: "),
        (line("a", "k", apis=["root"]), "keys:2: apis.0: "),
        (line("a", "k", concurrent=0), "keys:2: concurrent: "),
        (line("a", "k", expires="2027-01-31T00:00:00"), "keys:2: expires: "),
        (line("a", "k", secret="k"), "keys:2: secret: Extra inputs are not permitted"),
        (line("b", "k0"), "keys:2: sha256: the same key as of a"),
    ],
)
def test_what_is_wrong_is_told_with_line_and_rule_and_without_the_key(
    tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "keys").write_text(line("a", "k0") + "\n" + text)
    with pytest.raises(InvalidArgument) as caught:
        read_keys(tmp_path / "keys")
    assert caught.value.detail.startswith(words)
    assert len(caught.value.detail) < 400


def test_a_file_that_is_too_long_or_absent_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"#" * (MOST_BYTES + 1))
    for path, words in ((tmp_path / "keys", "more than"), (tmp_path / "none", "No such file")):
        with pytest.raises(InvalidArgument, match=words):
            Keyring(path)


FIELDS = st.sampled_from([*Key.model_fields, "x"])
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text())
LINES = st.dictionaries(FIELDS, VALUES, max_size=4).map(
    lambda more: json.dumps({**json.loads(line("a", "k")), **more}).encode()
)


@given(st.lists(st.binary(max_size=60) | LINES, max_size=4))
def test_any_file_is_read_or_refused_with_its_line(lines: list[bytes]) -> None:
    refusal, keys = "f:", []
    try:
        keys = [key for _, key in parse_keys(b"\n".join(lines), "f")]
    except InvalidArgument as error:
        refusal = error.detail
    assert refusal.startswith("f:")
    assert all(Tenant.decoded(key.encoded()).name == key.name for key in keys)


def test_keys_change_without_a_restart_and_a_wrong_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ring = keyring(tmp_path, line("a", "ka"))
    file = tmp_path / "keys"
    file.write_text(line("b", "secret"))
    ring.refresh()
    assert ring.find(b"ka") is None
    assert ring.find(b"secret") is not None
    with caplog.at_level(logging.ERROR):
        for wrong in ('{"name": "secret"', line("a", "ka", weight=-1)):
            file.write_text(wrong)
            ring.refresh()
            assert ring.find(b"secret") is not None
        file.unlink()
        ring.refresh()
    assert ring.find(b"secret") is not None
    assert [record.levelname for record in caplog.records].count("ERROR") == 3
    assert "E1005" in caplog.text
    assert "secret" not in caplog.text
    file.write_text(line("c", "kc"))
    ring.refresh()
    assert ring.find(b"kc") is not None


def test_the_worker_is_told_the_tenant_and_no_client_can_say_it(tmp_path: Path) -> None:
    doors = locked(tmp_path, line("a", "ka", weight=2, concurrent=3))
    forged = (HEADER.encode(), b'{"name":"root"}')
    drop = (b"connection", HEADER.encode())
    found = passed(
        doors["openai"], "POST", "/v1/chat/completions", CHAT, bearer("ka"), forged, drop
    )
    sent = found.encoded().partition(b"\r\n\r\n")[0].split(b"\r\n")
    told = [each for each in sent if each.lower().startswith(HEADER.encode())]
    assert told == [HEADER.encode() + b': {"name":"a","weight":2.0,"concurrent":3}']
    assert not any(b"ka" in each for each in sent)
    open_door = passed(gates()["openai"], "POST", "/v1/chat/completions", CHAT, forged)
    assert HEADER.encode() not in dict(open_door.headers)


@pytest.mark.parametrize(
    "body",
    [
        b'{"input":{"prompt":"x"}}',
        b'{"input":{"prompt":"x"},"context":{"own":"1","cog-triton-tenant":"{}"}}',
        b'{"input":{},"context":null,"\\u0063ontext":{"cog-triton-tenant":"x"}}',
        b'{"input":{},"context":[1]}',
        b"",
    ],
)
def test_a_prediction_has_its_tenant_in_its_context(tmp_path: Path, body: bytes) -> None:
    doors = locked(tmp_path, line("a", "ka", weight=2))
    found = passed(doors["cog"], "POST", "/predictions", body, bearer("ka"))
    written = json.loads(found.body)
    assert json.loads(written["context"][HEADER]) == {"name": "a", "weight": 2.0}
    assert found.body.count(HEADER.encode()) == 1
    assert dict(found.headers)[b"content-type"] == b"application/json"


@pytest.mark.parametrize(
    ("port", "method", "path", "api"),
    [
        ("cog", "POST", "/predictions", "predictions"),
        ("cog", "POST", "/predictions/x/cancel", "predictions"),
        ("openai", "POST", "/v1/chat/completions", "openai"),
        ("openai", "POST", "/v1/load_lora_adapter", "adapters"),
        ("openai", "GET", "/metrics/x", "openai"),
        ("triton", "GET", "/v2/models/stats", "triton"),
        ("cog", "POST", "/shutdown", "admin"),
    ],
)
def test_a_key_is_good_for_its_apis_alone(
    tmp_path: Path, port: str, method: str, path: str, api: str
) -> None:
    others = [each for each in ADMIN if each != api]
    doors = locked(tmp_path, line("a", "ka", apis=[api]), line("b", "kb", apis=others))
    assert status(doors[port], method, path, b"{}", bearer("ka")) == 200
    refusal = answered(doors[port], method, path, b"{}", bearer("kb"))
    assert refusal.status == 403
    assert f"the key of b is not for {api}" in refusal.body.decode()
    assert status(doors[port], method, path, b"{}", bearer("kc")) == 401


def test_health_needs_no_key_and_the_old_key_has_all_rights(tmp_path: Path) -> None:
    doors = locked(tmp_path, line("a", "ka"), api_key="own")
    assert status(doors["cog"], "GET", "/health-check") == 200
    assert status(doors["triton"], "GET", "/v2/models/stats", b"", bearer("own")) == 200
    assert status(doors["triton"], "GET", "/v2/models/stats", b"", bearer("ka")) == 403
    assert status(doors["triton"], "GET", "/v2/models/stats") == 401


def test_an_expired_key_is_named_by_its_id(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    doors = locked(
        tmp_path,
        line("a", "ka", expires=(now - timedelta(seconds=1)).isoformat()),
        line("b", "kb", expires=(now + timedelta(hours=1)).isoformat()),
    )
    asked = ("POST", "/v1/chat/completions", CHAT)
    assert status(doors["openai"], *asked, bearer("kb")) == 200
    refusal = answered(doors["openai"], *asked, bearer("ka"))
    assert refusal.status == 401
    assert f"the key {sha256_of(b'ka')[:8]} of a has expired" in refusal.body.decode()


def tried(limit: GuessLimit, address: str, key: bytes, right: bool) -> bool:
    try:
        limit.check(address, key, right)
    except Refused as refused:
        return (refused.status, refused.error.code) != (429, "E2107")
    return True


def test_guesses_are_limited_and_keys_that_were_used_before_are_not() -> None:
    now = 0.0
    limit = GuessLimit(lambda: now)
    assert tried(limit, "192.0.2.1", b"good", True)
    assert sum(tried(limit, "192.0.2.1", b"%d" % place, False) for place in range(200)) == 60
    assert not tried(limit, "192.0.2.1", b"guessed", True)
    assert tried(limit, "192.0.2.1", b"good", True)
    assert tried(limit, "192.0.2.2", b"guessed", True)
    now = 5.0
    assert sum(tried(limit, "192.0.2.1", b"%d" % place, False) for place in range(200)) == 5


def test_the_table_of_guessers_is_bounded() -> None:
    limit = GuessLimit(lambda: 0.0)
    for place in range(10_000):
        limit.check(f"10.0.{place // 256}.{place % 256}", b"x", False)
        limit.check("192.0.2.1", b"%d" % place, True)
    assert len(limit._peers) == 4096
    assert len(limit._peers["192.0.2.1"].good) == 64


def test_an_ipv6_network_is_one_guesser() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1")
    assert network_of("2001:db8::1") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:192.0.2.1") == network_of("192.0.2.1")
    assert network_of("") == ""


def test_key_trials_end_at_the_limit_for_many_keys_too(tmp_path: Path) -> None:
    doors = locked(tmp_path, *(line(f"t{place}", f"k{place}") for place in range(2000)))
    asked = ("POST", "/v1/chat/completions", CHAT)
    found = [status(doors["openai"], *asked, bearer(f"x{place}")) for place in range(80)]
    assert found == [401] * 60 + [429] * 20


@pytest.mark.parametrize("header", [None, "", "{}", "[", '{"name":"a","extra":1}', '{"name":1}'])
def test_a_worker_that_is_told_nothing_lets_nothing_pass(header: str | None) -> None:
    with pytest.raises(Unauthorized):
        Tenant.decoded(header)


def test_a_tenant_is_told_whole() -> None:
    key = Key(
        name="a",
        sha256="0" * 64,
        weight=2.5,
        priority=-3,
        models=("modèle", "x"),
        requests_per_minute=1,
        tokens_per_minute=2,
        concurrent=3,
        max_prompt_tokens=4,
    )
    told = Tenant.decoded(key.encoded())
    assert told == Tenant(**{name: getattr(key, name) for name in Tenant.model_fields})
    assert key.encoded().isascii()
    for call in (lambda: told.require_model("y"), lambda: told.require_length(5)):
        with pytest.raises(CogTritonError):
            call()
    told.require_model("x")
    told.require_length(4)
    assert [told.bounded_priority(asked) for asked in (None, -10, 5, 99)] == [-3, -3, 5, 10]
