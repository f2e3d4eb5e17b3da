"""Keys of any bytes and TLS of hostile clients before a real server, which must serve on.

Keys and certificate are in directories as a pod mounts Secrets: links to a ``..data`` that is
replaced at once.
"""

import json
import re
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from stack import Stack, pid_of, wait_until
from webhook_receiver import CERTIFICATE, needs_tls

from cog_triton.errors import InvalidArgument
from cog_triton.front.keyring import read_keys, sha256_of
from cog_triton.front.listener import Certificate

pytestmark = [pytest.mark.integration, pytest.mark.full, needs_tls]
MOCK = {"COG_TRITON_ENGINE": "mock", "MOCK_TPS": "0", "SERVED_MODEL_NAME": "m"}
CONNECTIONS = 64
MOST_HANDSHAKES = 512
MANY = 3000
OWN_DESCRIPTORS = 96
"""Of listeners, the engine and connections to the servers behind."""
MOST_GROWTH = 48 << 20
ASK = json.dumps({"model": "m", "prompt": "Hi", "max_tokens": 2}).encode()
_SETTINGS = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
    phases=(Phase.explicit, Phase.generate),  # to try less each time would take minutes
)
_WAITING = settings(_SETTINGS, max_examples=settings().max_examples // 2)
"""Of what takes two seconds each, as the server looks once a second."""


@dataclass
class Secret:
    """A directory as the kubelet mounts a Secret."""

    path: Path
    generation: int = 0
    names: set[str] = field(default_factory=set)

    def put(self, files: dict[str, bytes]) -> None:
        """Replace all files at once."""
        self.generation += 1
        new = self.path / f"..{self.generation}"
        new.mkdir(parents=True)
        for name, data in files.items():
            (new / name).write_bytes(data)
        link = self.path / "..data_tmp"
        link.symlink_to(new.name)
        link.rename(self.path / "..data")
        for name in files.keys() - self.names:
            (self.path / name).symlink_to(f"..data/{name}")
        for name in self.names - files.keys():
            (self.path / name).unlink()
        self.names = set(files)


@dataclass
class Served:
    """A server, its Secrets, and what clients trust."""

    stack: Stack
    keys: Secret
    tls: Secret
    trusted: Path

    @property
    def pid(self) -> int:
        """PID of the server."""
        return pid_of(self.stack, "cog_triton.front.server")

    @property
    def descriptors(self) -> int:
        """Open files of the server."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    @property
    def memory(self) -> int:
        """Resident bytes of the server."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) << 10

    def status(self, key: str) -> int:
        """Status of a completion with this key, on a connection of its own."""
        verify = ssl.create_default_context(cafile=self.trusted)
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        url = f"https://localhost:{self.stack.openai}/v1/completions"
        return httpx.post(url, content=ASK, headers=headers, verify=verify, timeout=60).status_code

    def raw(self) -> socket.socket:
        """A connection without TLS."""
        return socket.create_connection(("127.0.0.1", self.stack.openai))

    def count(self, words: str) -> int:
        """How often the log says so."""
        return self.stack.output.count(words)


def line(name: str, **values: object) -> bytes:
    return json.dumps({"name": name, "sha256": sha256_of(name.encode()), **values}).encode()


def certificate(directory: Path) -> dict[str, bytes]:
    """A certificate of localhost that signs itself, and its key."""
    chain, end, key = CERTIFICATE.read_bytes().partition(b"-----END CERTIFICATE-----\n")
    (directory / "made.crt").write_bytes(chain + end)
    (directory / "made.key").write_bytes(key)
    return {"tls.crt": chain + end, "tls.key": key}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("hostile")
    keys, tls = Secret(directory / "keys"), Secret(directory / "tls")
    made = certificate(directory)
    keys.put({"some": line("own")})
    tls.put(made)
    stack = Stack(
        directory / "work",
        None,
        **MOCK,
        COG_TRITON_KEYS=str(keys.path),
        TLS_CERT_FILE=str(tls.path / "tls.crt"),
        TLS_KEY_FILE=str(tls.path / "tls.key"),
        MAX_CONNECTIONS=str(CONNECTIONS),
    )
    try:
        stack.start()
        wait_until(lambda: "Ready in" in stack.output)
        yield Served(stack, keys, tls, directory / "made.crt")
        code, output = stack.finish(signal.SIGTERM)
        assert code == 0
        assert "Traceback" not in output
        assert "exception was never retrieved" not in output
    finally:
        stack.close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
)
FIELDS = ["weight", "priority", "concurrent", "apis", "models", "expires", "name", "x"]
VALUES = st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=3)
LINES = VALUES.map(lambda more: json.dumps({**json.loads(line("a")), **more}).encode())
HUGE = [b"[" * 200_000, b"#" * (9 << 20), b'{"a":' * 100_000, b"9" * 6000, line("a")[:-9]]
TWICE = [line("own"), line("a")[:-1] + b',"name":"b"}', line("a")[:-1] + b',"apis":[],"apis":[]}']
LIMITS = [line("a", weight=1e308), line("a", concurrent=0), line("a", tokens_per_minute=10**13)]


def why_refused(keys: Path) -> str:
    """What is wrong with keys; empty where nothing is."""
    try:
        read_keys(keys)
    except InvalidArgument as error:
        return error.detail
    return ""


@_WAITING
@given(
    st.binary(max_size=200) | LINES | st.sampled_from([*HUGE, *TWICE, *LIMITS]),
    st.sampled_from(["some", "two"]),
)
def test_whatever_a_secret_holds_its_keys_are_taken_or_those_of_before_stay(
    served: Served, data: bytes, name: str
) -> None:
    fresh = f"k{served.keys.generation}"
    taken, stayed = "new keys are in use", "keys of before stay"
    before = served.count(taken), served.count(stayed)
    served.keys.put({"some": line("own"), name: data + b"\n" + line(fresh)})
    if refusal := why_refused(served.keys.path):
        wait_until(lambda: served.count(stayed) > before[1], 30)
        assert f"E1005 InvalidArgument: {refusal[:60]}" in served.stack.output
        assert refusal.startswith((f"{name}:", "two:", f"{served.keys.path}/{name}: more"))
        assert served.status(fresh) == 401
    else:
        wait_until(lambda: served.count(taken) > before[0], 30)
        assert served.status(fresh) == 200
    taken_before = served.count(taken)
    served.keys.put({"some": line("own") + b"\n" + line(f"after-{fresh}")})
    wait_until(lambda: served.count(taken) > taken_before, 30)
    assert served.status(fresh) == 401
    assert served.status(f"after-{fresh}") == 200


HELLO_SIZE = 517


def client_hello() -> bytes:
    """What a client says first."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


CHANGES = st.lists(st.tuples(st.integers(0, HELLO_SIZE), st.integers(0, 255)), max_size=4)


@_SETTINGS
@given(CHANGES, st.integers(0, HELLO_SIZE), st.binary(max_size=2000))
def test_whatever_is_sent_in_the_place_of_a_handshake_the_next_one_is_served(
    served: Served, changes: list[tuple[int, int]], end: int, more: bytes
) -> None:
    hello = bytearray(client_hello())
    for place, byte in changes:
        hello[place % len(hello)] = byte
    for data in (bytes(hello), bytes(hello[:end]) + more, more, bytes(hello) + more):
        with served.raw() as raw, suppress(ConnectionError, TimeoutError):
            raw.sendall(data)
            raw.settimeout(0.05)
            raw.recv(1 << 16)
    assert served.status("own") == 200


def test_thousands_of_aborted_handshakes_leave_no_descriptor_and_little_memory(
    served: Served,
) -> None:
    some, hello = Random(1), client_hello()
    pieces = [b"", b"\x16", hello[:100], hello, hello + b"\x14\x03\x03\x00\x01\x01", b"GET / "]

    def abort(count: int) -> None:
        for _ in range(count):
            with served.raw() as raw:
                with suppress(ConnectionError):
                    raw.sendall(some.choice(pieces))
                if some.random() < 0.5:  # a reset, not an end
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    abort(MANY // 3)
    wait_until(lambda: served.descriptors <= OWN_DESCRIPTORS, 30)
    before = served.memory
    abort(MANY)
    assert served.status("own") == 200
    wait_until(lambda: served.descriptors <= OWN_DESCRIPTORS, 30)
    assert served.memory < before + MOST_GROWTH


def test_half_handshakes_that_are_held_are_bounded_and_keep_nobody_out(served: Served) -> None:
    hello = client_hello()
    with ExitStack() as held:
        for place in range(2 * MOST_HANDSHAKES):
            raw = served.raw()
            held.enter_context(raw)
            with suppress(ConnectionError):
                raw.sendall((b"", hello[:9], hello)[place % 3])
        assert served.status("own") == 200
        assert served.descriptors <= MOST_HANDSHAKES + OWN_DESCRIPTORS
        # Nobody has answered; each handshake has 10 s.
        wait_until(lambda: served.descriptors <= OWN_DESCRIPTORS, 60)
    assert served.status("own") == 200


def test_nobody_renegotiates(served: Served) -> None:
    command = ["openssl", "s_client", "-tls1_2", "-legacy_renegotiation", "-CAfile"]
    command += [str(served.trusted), "-connect", f"localhost:{served.stack.openai}"]
    said = subprocess.run(command, input=b"R\nR\nR\n", capture_output=True, timeout=60, check=False)
    text = (said.stdout + said.stderr).decode(errors="replace")
    assert "RENEGOTIATING" in text
    assert "no renegotiation" in text or "ssl3_read_bytes" in text
    assert served.status("own") == 200


@_WAITING
@given(st.binary(max_size=200), st.integers(0, 400), st.sampled_from(["tls.crt", "tls.key"]))
def test_a_certificate_of_any_bytes_leaves_that_of_before(
    served: Served, noise: bytes, place: int, name: str
) -> None:
    good = {"tls.crt": served.trusted.read_bytes(), "tls.key": b""}
    good["tls.key"] = served.trusted.with_suffix(".key").read_bytes()
    damaged = noise + good[name][:place] + b"\n!" + noise + good[name][-20:]
    refused = served.count("the certificate of before stays")
    made = served.count("a new certificate is in use")
    served.tls.put({**good, name: damaged})
    try:
        Certificate(served.tls.path / "tls.crt", served.tls.path / "tls.key")
    except InvalidArgument:
        wait_until(lambda: served.count("the certificate of before stays") > refused, 30)
        said = served.stack.output.rpartition("the certificate of before stays")[2]
        assert "E1005" in said[:300]
    else:  # other bytes of the same certificate
        wait_until(lambda: served.count("a new certificate is in use") > made, 30)
    assert served.status("own") == 200
    made = served.count("a new certificate is in use")
    served.tls.put(good)
    wait_until(lambda: served.count("a new certificate is in use") > made, 30)
    assert served.status("own") == 200
