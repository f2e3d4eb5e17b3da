"""Config sources: files, text, data URLs and a real HTTP server, and their errors."""

from __future__ import annotations

import base64
import contextlib
import os
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import quote

import pytest
from http_replies import reply, serving

from cog_triton.builder import config_source
from cog_triton.builder.config_source import MAX_BYTES, fetch
from cog_triton.errors import BuildConfigInvalid
from cog_triton.system.ports import free_ports

TEXT = "model_id: größe\n"


def answer(request: BaseHTTPRequestHandler) -> None:
    match request.path.partition("?")[0]:
        case "/c.yaml":
            reply(request, 200, TEXT.encode())
        case "/moved":
            reply(request, 302, Location="/c.yaml")
        case "/away":
            reply(request, 302, Location="file:///etc/hostname")
        case "/latin":
            reply(request, 200, "größe".encode("latin-1"))
        case "/large":
            reply(request, 200, b"#" * (MAX_BYTES + 1))
        case "/endless":
            request.send_response(200)
            request.end_headers()
            try:
                while True:
                    request.wfile.write(b"#" * 65536)
            except OSError:
                request.close_connection = True
        case "/torn":
            request.send_response(200)
            request.send_header("Content-Length", "100")
            request.end_headers()
            request.wfile.write(b"model_id:")
            request.close_connection = True
        case _:
            reply(request, 404)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving(answer) as url:
        yield url


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a config.yaml"
    path.write_text(TEXT, "utf-8")
    return path


def test_config_from_a_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetch(str(file)) == (TEXT, str(file))
    monkeypatch.chdir(file.parent)
    assert fetch(file.name)[0] == TEXT
    for host in ("", "localhost"):
        url = f"file://{host}{quote(str(file))}"
        assert fetch(url) == (TEXT, url)


def test_config_from_text_and_data_urls() -> None:
    assert fetch(TEXT) == (TEXT, "the text")
    encoded = base64.b64encode(TEXT.encode()).decode()
    assert fetch(f"data:application/yaml;base64,{encoded}") == (TEXT, "the data URL")
    assert fetch(f"data:,{quote(TEXT)}")[0] == TEXT


def test_config_over_http(server: str) -> None:
    assert fetch(f"{server}/c.yaml?signature=secret") == (TEXT, f"{server}/c.yaml")
    assert fetch(f"{server}/moved")[0] == TEXT


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("/nothing", "HTTP 404 Not Found"),
        ("/latin", "is not UTF-8 text"),
        ("/large", f"is longer than {MAX_BYTES} bytes"),
        ("/endless", f"is longer than {MAX_BYTES} bytes"),
        ("/torn", "peer closed connection"),
        ("/away", "unsupported protocol"),
    ],
)
def test_http_errors_have_a_code_and_are_redacted(server: str, path: str, rule: str) -> None:
    address = server.replace("//", "//user:secret@") + path + "?key=secret"
    with pytest.raises(BuildConfigInvalid) as caught:
        fetch(address)
    assert f"config='{server}{path}': " in str(caught.value)
    assert rule in str(caught.value)
    assert "secret" not in str(caught.value)


def test_unreachable_server() -> None:
    with pytest.raises(BuildConfigInvalid, match="refused"):
        fetch(f"http://127.0.0.1:{free_ports(1)[0]}/c.yaml")


@pytest.mark.parametrize(
    ("address", "rule"),
    [
        ("/no/such/file", "no such file"),
        ("/", "no such file"),
        ("x" * 100_000, "cannot be read"),
        ("a\0b", "no such file|embedded null"),
        ("ftp://host/c.yaml", "must be a path, or"),
        ("file://elsewhere/c.yaml", "must be a path, or"),
        ("http://[::1/c.yaml", "not a URL"),
        ("http:///c.yaml", "config='http:///c.yaml'"),
        ("data:nothing", "not a data URL"),
        ("data:;base64,a", "not a data URL"),
        ("data:,%ff%fe", "is not UTF-8"),
        ("a\n\ud800", "is not UTF-8"),
        ("#\n" * MAX_BYTES, "is longer than"),
    ],
)
def test_unusable_addresses(address: str, rule: str) -> None:
    with pytest.raises(BuildConfigInvalid, match=rule) as caught:
        fetch(address)
    assert len(str(caught.value)) < 1000


def test_endless_response_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def drip(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        with contextlib.suppress(OSError):
            while True:
                request.wfile.write(b"#")
                time.sleep(0.01)

    monkeypatch.setattr(config_source, "_TIMEOUT_S", 1.0)
    with (
        serving(drip) as url,
        pytest.raises(BuildConfigInvalid, match=r"/c\.yaml': is not here after 1 s"),
    ):
        fetch(f"{url}/c.yaml?sig=secret")


def test_named_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BuildConfigInvalid, match="no such file"):
        fetch(str(tmp_path / "pipe"))


def test_file_over_the_size_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"#" * MAX_BYTES)
    assert len(fetch(str(path))[0]) == MAX_BYTES
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(BuildConfigInvalid, match="is longer than"):
        fetch(str(path))
