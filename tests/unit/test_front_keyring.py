"""Keys of tenants: the file, its hashes, its reload, who may pass, and whose work it is."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_front import answered, gates, on_loop, opened, status
from starlette.types import Receive, Scope, Send

from cog_triton.errors import InvalidArgument
from cog_triton.front.access import Access
from cog_triton.front.keyring import MOST_BYTES as MOST
from cog_triton.front.keyring import MOST_FILES, Key, Keyring, parse_keys, read_keys, sha256_of
from cog_triton.front.message import Answer
from cog_triton.serving.tenants import CURRENT
from cog_triton.system.log_format import request_id

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
        ("[]", "keys:2: line: "),
        ('{"name": "a"}', "keys:2: sha256: Field required"),
        (line("a b", "k"), "keys:2: name: "),
        (line("a", "k", weight=0), "keys:2: weight: Input should be greater than or equal to 0.01"),
        (line("a", "k", priority=True), "keys:2: priority: "),
        (line("a", "k", apis=["root"]), "keys:2: apis.0: "),
        (line("a", "k", expires="2027-01-31T00:00:00"), "keys:2: expires: "),
        (line("a", "k", secret="k"), "keys:2: secret: Extra inputs are not permitted"),
        ('{"name": ' + "9" * 5000 + "}", "keys:2: must be a JSON object on one line"),
        (line("a", "k")[:-1] + ', "name": "root"}', "keys:2: name: is there twice"),
        (line("a", "k")[:-1] + ', "apis": [], "\\u0061pis": []}', "keys:2: apis: is there twice"),
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


FIELDS = st.sampled_from([*Key.model_fields, "x"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.datetimes().map(str),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=3),
)
LINES = st.dictionaries(FIELDS, JSON, max_size=4).map(
    lambda more: json.dumps({**json.loads(line("a", "k")), **more}).encode()
)
ODD = st.sampled_from([b"[" * 10_000, b'{"name":' * 5000, b"9" * 5000, b"\xef\xbb\xbf{}", b"\0"])
FILES = st.lists(st.binary(max_size=60) | LINES | ODD, max_size=4).map(b"\n".join)


@given(FILES)
def test_any_file_is_read_or_refused_with_its_line(data: bytes) -> None:
    refusal, keys = "f:", []
    try:
        keys = [key for _, key in parse_keys(data, "f")]
    except InvalidArgument as error:
        refusal = error.detail
    assert refusal.startswith("f:")
    assert len(refusal) < 400
    assert all(key.expired in (True, False) for key in keys)


def test_what_is_no_file_or_too_much_is_refused_by_name_and_holds_up_nothing(
    tmp_path: Path,
) -> None:
    for name, count, size in (("many", MOST_FILES + 1, 0), ("large", 3, MOST // 2)):
        (tmp_path / name).mkdir()
        for place in range(count):
            (tmp_path / name / str(place)).write_bytes(b"#" * size)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "some" / "deep").mkdir(parents=True)
    for name, words in {
        "pipe": "pipe: must be a file",
        "some": "deep: must be a file",
        "/dev/zero": "zero: must be a file",
        "many": f"{MOST_FILES + 1} files; {MOST_FILES} at most",
        "large": f"large/2: more than {MOST} bytes, with the files before it",
    }.items():
        with pytest.raises(InvalidArgument, match=words):
            Keyring(tmp_path / name)


@on_loop
async def test_an_application_works_for_the_tenant_of_each_request_alone(tmp_path: Path) -> None:
    seen: list[tuple[Any, ...]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        seen.append((scope["path"], scope["query_string"], body, CURRENT.get(), scope["headers"]))
        assert not request_id.get()
        request_id.set(scope["path"])
        await Answer(200, b"")(scope, receive, send)

    gate = locked(tmp_path, line("a", "ka", weight=2, concurrent=3))["openai"]
    gate.app = app
    head = b"POST /v1/a%20b?c=d HTTP/1.1\r\nauthorization: Bearer ka\r\nhost: x\r\n"
    pipelined = b"content-length: %d\r\n\r\n%bGET /health HTTP/1.1\r\nconnection: close\r\n\r\n"
    async with opened(gate) as front:
        assert (await front.ask(head + pipelined % (len(CHAT), CHAT))).count(b" 200 OK") == 2
    (*asked, tenant, headers), (path, *_, nobody, _) = seen
    assert asked == ["/v1/a b", b"c=d", CHAT]
    assert (tenant.name, tenant.weight, tenant.concurrent) == ("a", 2, 3)
    assert [name for name, _ in headers] == [b"host", b"content-length"]
    assert (path, nobody) == ("/health", None)


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
    fronts = locked(tmp_path, line("a", "ka", apis=[api]), line("b", "kb", apis=others))
    assert status(fronts[port], method, path, b"{}", bearer("ka")) == 200
    refusal = answered(fronts[port], method, path, b"{}", bearer("kb"))
    assert refusal.status == 403
    assert f"the key of b is not for {api}" in refusal.body.decode()
    assert status(fronts[port], method, path, b"{}", bearer("kc")) == 401


def test_an_expired_key_is_named_by_its_id(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    fronts = locked(
        tmp_path,
        line("a", "ka", expires=(now - timedelta(seconds=1)).isoformat()),
        line("b", "kb", expires=(now + timedelta(hours=1)).isoformat()),
    )
    asked = (fronts["openai"], "POST", "/v1/chat/completions", CHAT)
    assert status(*asked, bearer("kb")) == 200
    refusal = answered(*asked, bearer("ka"))
    assert refusal.status == 401
    assert f"the key {sha256_of(b'ka')[:8]} of a has expired" in refusal.body.decode()
