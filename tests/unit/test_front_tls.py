"""TLS of the front: certificates that change, and ends of TLS that no client takes."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
from small_front import PATIENCE_S, PassGate, on_loop, opened, until

from cog_triton.errors import InvalidArgument
from cog_triton.front import listener
from cog_triton.front.listener import Certificate
from cog_triton.front.message import Answer, Limits, Request

OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="no openssl, which makes certificates")
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


def make(directory: Path, name: str = "localhost") -> tuple[Path, Path]:
    """A certificate for `name` that signs itself, and its key."""
    chain, key = directory / "chain.pem", directory / "key.pem"
    command = f"{OPENSSL} req -x509 -nodes -days 2 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1"
    command += f" -subj /CN={name} -addext subjectAltName=DNS:{name} -keyout {key} -out {chain}"
    subprocess.run(command.split(), check=True, capture_output=True)
    return chain, key


class HelloGate(PassGate):
    async def decide(self, request: Request) -> Answer:  # type: ignore[override]
        return Answer(200, b"hello", b"text/plain")


@asynccontextmanager
async def secured(certificate: Certificate, connections: int = 4096) -> AsyncIterator[int]:
    async with opened(HelloGate(), Limits(connections=connections), certificate) as front:
        yield front.port


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


@on_loop
async def test_a_new_certificate_is_shown_and_a_wrong_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain, key = make(tmp_path)
    certificate = Certificate(chain, key)
    async with secured(certificate) as port:
        assert (await asked(port, chain, data=b"nonsense\r\n\r\n")).startswith(b"HTTP/1.1 400")
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
    assert [each.levelname for each in caplog.records].count("ERROR") == 2
    assert "E1005" in caplog.text
    assert "secret" not in caplog.text


@on_loop
async def test_connections_that_take_no_end_of_tls_give_their_descriptors_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_SHUTDOWN_S", 3600.0)

    def shaken(port: int) -> ssl.SSLSocket:
        raw = socket.create_connection(("127.0.0.1", port))
        return ssl._create_unverified_context().wrap_socket(raw)

    def descriptors() -> int:
        return len([*Path("/proc/self/fd").iterdir()])

    async with secured(Certificate(*make(tmp_path)), 5) as port:
        before = descriptors()
        with ExitStack() as held:
            for _ in range(40):
                held.enter_context(await asyncio.to_thread(shaken, port))
            await until(lambda: descriptors() - before - 40 <= 5 + 1)


def test_a_key_with_a_password_is_refused_and_asks_nobody(tmp_path: Path) -> None:
    chain, key = make(tmp_path)
    locked = tmp_path / "locked.pem"
    command = f"{OPENSSL} ec -aes256 -passout pass:secret -in {key} -out {locked}"
    subprocess.run(command.split(), check=True, capture_output=True)
    with pytest.raises(InvalidArgument, match="without a password"):
        Certificate(chain, locked)
