"""TLS of the front door: certificates that change, handshakes that hang, and who speaks no TLS."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_door import PATIENCE_S, PassGate, on_loop, run, until

from cog_triton.door import client_connection
from cog_triton.door.client_connection import BACKLOG, ClientConnection, Connections, Listener
from cog_triton.door.message import Answer, Request
from cog_triton.door.relay import ReadCoalescing
from cog_triton.door.request_parser import Limits
from cog_triton.door.tls import Certificate
from cog_triton.errors import InvalidArgument
from cog_triton.system.ports import bind

OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="no openssl, which makes certificates")
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


def make(directory: Path, name: str = "localhost") -> tuple[Path, Path]:
    """A certificate for `name` that signs itself, and its key."""
    chain, key = directory / "chain.pem", directory / "key.pem"
    assert OPENSSL is not None
    command = [OPENSSL, *["req", "-x509", "-nodes", "-days", "2", "-newkey", "ec", "-pkeyopt"]]
    command += ["ec_paramgen_curve:prime256v1", "-subj", f"/CN={name}"]
    command += ["-addext", f"subjectAltName=DNS:{name}", "-keyout", str(key), "-out", str(chain)]
    subprocess.run(command, check=True, capture_output=True)
    return chain, key


class HelloGate(PassGate):
    async def decide(self, request: Request) -> Answer:
        return Answer(200, b"hello", b"text/plain")


@asynccontextmanager
async def secured(certificate: Certificate, connections: int = 4096) -> AsyncIterator[int]:
    limits = replace(Limits(), connections=connections)
    counted = Connections(limits.connections, limits.all_bodies_bytes)
    sock = bind("PORT", "127.0.0.1", 0, BACKLOG)
    coalescing = ReadCoalescing(asyncio.get_running_loop())
    gate = HelloGate(1)

    def connection() -> ClientConnection:
        return ClientConnection(gate, limits, counted, coalescing)

    listener = Listener(sock, connection, certificate)
    try:
        yield sock.getsockname()[1]
    finally:
        listener.close()
        counted.abort_all()
        await asyncio.sleep(0)


async def asked(port: int, trusted: Path, name: str = "localhost", data: bytes = GET) -> bytes:
    """What a client gets that knows this certificate; all of it until the end."""
    context = ssl.create_default_context(cafile=trusted)
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname=name
    )
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(65536), PATIENCE_S)
    finally:
        writer.close()


def test_requests_are_answered_over_tls_and_refusals_arrive(tmp_path: Path) -> None:
    async def main() -> None:
        chain, key = make(tmp_path)
        async with secured(Certificate(chain, key)) as port:
            assert (await asked(port, chain)).endswith(b"hello")
            assert (await asked(port, chain, data=b"nonsense\r\n\r\n")).startswith(b"HTTP/1.1 400")

    run(main())


def test_a_new_certificate_is_shown_and_a_wrong_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        chain, key = make(tmp_path)
        certificate = Certificate(chain, key)
        async with secured(certificate) as port:
            make(tmp_path, "second.example")
            with pytest.raises(ssl.SSLError):
                await asked(port, chain, "second.example")
            certificate.refresh()
            assert (await asked(port, chain, "second.example")).endswith(b"hello")
            trusted = tmp_path / "trusted.pem"
            trusted.write_bytes(chain.read_bytes())
            key.write_text("secret")
            with caplog.at_level(logging.ERROR):
                certificate.refresh()
                chain.unlink()
                certificate.refresh()
            assert (await asked(port, trusted, "second.example")).endswith(b"hello")
        errors = [each for each in caplog.records if each.levelname == "ERROR"]
        assert len(errors) == 2
        assert "E1005" in caplog.text
        assert "secret" not in caplog.text

    run(main())


@pytest.mark.parametrize("text", ["", "-----BEGIN CERTIFICATE-----\n!\n", "key"])
def test_wrong_files_are_refused_by_name(tmp_path: Path, text: str) -> None:
    chain, key = make(tmp_path)
    if text == "key":
        chain, key = key, chain
    else:
        chain.write_text(text)
    with pytest.raises(InvalidArgument, match="TLS_CERT_FILE="):
        Certificate(chain, key)
    with pytest.raises(InvalidArgument, match="No such file"):
        Certificate(tmp_path / "none", key)


def test_a_key_with_a_password_is_refused_and_asks_nobody(tmp_path: Path) -> None:
    chain, key = make(tmp_path)
    assert OPENSSL is not None
    locked = tmp_path / "locked.pem"
    command = [OPENSSL, *["ec", "-aes256", "-passout", "pass:secret"]]
    subprocess.run(
        [*command, "-in", str(key), "-out", str(locked)], check=True, capture_output=True
    )
    with pytest.raises(InvalidArgument, match="without a password"):
        Certificate(chain, locked)


async def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    with suppress(ConnectionError):
        return await asyncio.get_running_loop().sock_recv(connection, 1) == b""
    return True


def test_handshakes_that_hang_are_bounded_and_keep_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_connection, "_MOST_HANDSHAKES", 5)
    monkeypatch.setattr(client_connection, "_HANDSHAKE_S", 1000.0)

    async def main() -> None:
        chain, key = make(tmp_path)
        async with secured(Certificate(chain, key)) as port:
            held = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
            try:
                assert (await asked(port, chain)).endswith(b"hello")
                assert await asyncio.gather(*map(is_closed, held[:30])) == [True] * 30
            finally:
                for each in held:
                    each.close()

    run(main())


def test_connections_that_take_no_end_of_tls_give_their_descriptors_back(tmp_path: Path) -> None:
    def shaken(port: int) -> ssl.SSLSocket:
        raw = socket.create_connection(("127.0.0.1", port))
        return ssl._create_unverified_context().wrap_socket(raw)

    def descriptors() -> int:
        return len([*Path("/proc/self/fd").iterdir()])

    async def main() -> None:
        chain, key = make(tmp_path)
        async with secured(Certificate(chain, key), 5) as port:
            held: list[ssl.SSLSocket] = []
            before = descriptors()
            try:
                for _ in range(40):
                    held.append(await asyncio.to_thread(shaken, port))
                await until(lambda: descriptors() - before - len(held) <= 5 + 1)
            finally:
                for each in held:
                    each.close()

    run(main())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make(tmp_path_factory.mktemp("tls"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4))
def test_whatever_is_sent_in_the_place_of_tls_the_next_one_is_served(
    files: tuple[Path, Path], pieces: list[bytes]
) -> None:
    @on_loop
    async def main() -> Any:
        async with secured(Certificate(*files)) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            with suppress(ConnectionError):
                for piece in (b"\x16\x03\x01\x00\xff" + pieces[0], *pieces[1:]):
                    writer.write(piece)
                    await writer.drain()
            assert (await asked(port, files[0])).endswith(b"hello")
            writer.close()

    main()
