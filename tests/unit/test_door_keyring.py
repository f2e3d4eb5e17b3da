"""Keys of tenants: the file, its hashes, its reload, who may pass, and what a worker is told."""

from __future__ import annotations

import errno
import json
import logging
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_door import answered, gates, passed, status

from cog_triton.door.access import Access
from cog_triton.door.keyring import (
    MOST_BYTES,
    MOST_FILES,
    Key,
    Keyring,
    parse_keys,
    read_keys,
    sha256_of,
)
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
        (line("a", "k", expires=1e300), "keys:2: expires: "),
        (line("a", "k", weight=10**400), "keys:2: weight: "),
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


def test_a_file_that_is_too_long_or_absent_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"#" * (MOST_BYTES + 1))
    for path, words in ((tmp_path / "keys", "more than"), (tmp_path / "none", "No such file")):
        with pytest.raises(InvalidArgument, match=words):
            Keyring(path)


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
    assert all(Tenant.decoded(key.encoded).name == key.name for key in keys)
    assert all(key.expired in (True, False) for key in keys)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(FILES, min_size=1, max_size=3))
def test_whatever_is_written_the_keys_are_all_of_it_or_those_of_before(
    tmp_path: Path, versions: list[bytes]
) -> None:
    file = tmp_path / "keys"
    file.write_text(line("own", "own"))
    ring = Keyring(file)
    for data in versions:
        before = ring._table
        file.write_bytes(data)
        ring.refresh()
        try:
            assert list(ring._table.keys.values()) == read_keys(file)
        except InvalidArgument:
            assert ring._table is before


def test_a_file_that_is_being_written_never_gives_half_of_its_keys(tmp_path: Path) -> None:
    text = "\n".join(line(f"t{place}", f"k{place}") for place in range(3)).encode()
    file = tmp_path / "keys"
    file.write_bytes(text)
    ring = Keyring(file)
    for end in range(len(text) + 1):
        file.write_bytes(text[:end])
        ring.refresh()
        named = [key.name for key in ring._table.keys.values()]
        assert named == [f"t{place}" for place in range(len(named))]
    assert len(named) == 3


def test_a_change_that_shows_in_no_time_and_no_size_is_seen(tmp_path: Path) -> None:
    ring = keyring(tmp_path, line("a", "ka"))
    file = tmp_path / "keys"
    ring.refresh()
    shown = file.stat()
    file.write_text(file.read_text().replace(sha256_of(b"ka"), sha256_of(b"kb")))
    os.utime(file, ns=(shown.st_atime_ns, shown.st_mtime_ns))
    ring.refresh()
    assert (ring.find(b"ka"), (ring.find(b"kb") or Key).name) == (None, "a")


def test_keys_that_could_not_be_read_are_read_later_though_they_did_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ring = keyring(tmp_path, line("a", "ka"))
    file = tmp_path / "keys"
    file.write_text(line("b", "kb"))
    os.utime(file, (1, 1))

    def scarce(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr("os.open", scarce)
        ring.refresh()
        ring.refresh()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    ring.refresh()
    assert (ring.find(b"ka"), (ring.find(b"kb") or Key).name) == (None, "b")


def test_a_mounted_secret_is_switched_whole(tmp_path: Path) -> None:
    def generation(number: int) -> None:
        """As the kubelet does: a new directory, and one link to it that is replaced."""
        new = tmp_path / f"..{number}"
        new.mkdir()
        for name in ("one", "two"):
            (new / name).write_text(line(name, f"{name}{number}"))
            os.utime(new / name, (1, 1))
        (tmp_path / "..data_tmp").symlink_to(new.name)
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")

    generation(1)
    for name in ("one", "two"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    ring = Keyring(tmp_path)
    for number in (2, 3):
        generation(number)
        ring.refresh()
        assert ring.find(f"one{number - 1}".encode()) is None
        assert all(ring.find(f"{name}{number}".encode()) for name in ("one", "two"))
    (tmp_path / "..3" / "two").write_text("{")
    ring.refresh()
    assert ring.find(b"two3") is not None


def test_what_is_no_file_or_too_much_is_refused_by_name_and_holds_up_nothing(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "some" / "deep").mkdir(parents=True)
    refused = {tmp_path / "pipe": "pipe: must be a file", tmp_path / "some": "deep: must be a file"}
    refused |= {Path("/dev/zero"): "zero: must be a file"}
    (tmp_path / "many").mkdir()
    for place in range(MOST_FILES + 1):
        (tmp_path / "many" / str(place)).touch()
    refused[tmp_path / "many"] = f"{MOST_FILES + 1} files; {MOST_FILES} at most"
    (tmp_path / "large").mkdir()
    for place in range(3):
        (tmp_path / "large" / str(place)).write_bytes(b"#" * (MOST_BYTES // 2))
    refused[tmp_path / "large"] = f"large/2: more than {MOST_BYTES} bytes, with the files before it"
    for path, words in refused.items():
        with pytest.raises(InvalidArgument, match=words):
            Keyring(path)


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
    told = Tenant.decoded(key.encoded)
    assert told == Tenant(**{name: getattr(key, name) for name in Tenant.model_fields})
    assert key.encoded.isascii()
    for call in (lambda: told.require_model("y"), lambda: told.require_length(5)):
        with pytest.raises(CogTritonError):
            call()
    told.require_model("x")
    told.require_length(4)
    assert [told.bounded_priority(asked) for asked in (None, -10, 5, 99)] == [-3, -3, 5, 10]
