"""Image fetch: the allow-list, private addresses, redirects, sizes and slow hosts (SSRF)."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest
from image_files import image

from cog_triton.errors import InvalidArgument
from cog_triton.serving.openai.image_fetch import ImageFetcher

NAMES = {
    "pictures.example.com": ["93.184.216.34"],
    "inside.example.com": ["10.1.2.3"],
    "rebound.example.com": ["93.184.216.34", "169.254.169.254"],
    "mapped.example.com": ["::ffff:127.0.0.1"],
    "shared.example.com": ["100.64.0.1"],
    "unique.example.com": ["fd00::1"],
    "zero.example.com": ["0.0.0.0"],
    "nat.example.com": ["64:ff9b::7f00:1"],
    "here.example.com": ["127.0.0.1"],
}


def resolve(host: str) -> Sequence[str]:
    return NAMES.get(host, [host] if host[:1].isdigit() or ":" in host else [])


def fetch(url: str, *rules: str, most: int = 1 << 20, timeout: float = 60) -> bytes:
    made = ImageFetcher(rules, resolve, timeout)
    return made.fetch("part", url, most, time.monotonic() + timeout)


def refusal(url: str, *rules: str, most: int = 1 << 20, timeout: float = 60) -> str:
    with pytest.raises(InvalidArgument) as caught:
        fetch(url, *rules, most=most, timeout=timeout)
    return caught.value.detail


@contextmanager
def host(answer: Callable[[socket.socket, bytes], None]) -> Iterator[tuple[int, list[bytes]]]:
    """A server on 127.0.0.1: its port, and the heads of requests."""
    heads: list[bytes] = []
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                heads.append(connection.recv(1 << 16))
                with suppress(OSError):  # the client may have gone
                    answer(connection, heads[-1])

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1], heads
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(60)


def whole(data: bytes, status: str = "200 OK", headers: str = "") -> Callable[..., None]:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n{headers}\r\n".encode()
    return lambda connection, _: connection.sendall(head + data)


def test_an_image_of_an_allowed_host_is_fetched() -> None:
    with host(whole(image())) as (port, heads):
        url = f"http://here.example.com:{port}/a%20b.png?size=1#top"
        assert fetch(url, "127.0.0.0/8") == image()
    (head,) = heads
    assert head.startswith(b"GET /a%20b.png?size=1 HTTP/1.1\r\n")
    assert f"Host: here.example.com:{port}\r\n".encode() in head


@pytest.mark.parametrize(
    ("url", "rules"),
    [
        ("http://pictures.example.com/", ["other.example.com"]),
        ("http://example.com/", ["*.example.com"]),
        ("http://unknown.example.com/", ["*"]),
        ("http://pictures.example.com.evil.org/", ["pictures.example.com"]),
        ("http://pictures.example.com@10.0.0.1/", ["pictures.example.com"]),
        # By name or by any host alone, never to a private network.
        *((f"http://{name}/", ["*", "*.example.com", name]) for name in NAMES if name[0] != "p"),
        *(
            (f"http://{address}/", ["*"])
            for address in ("127.0.0.1", "10.0.0.1", "[::1]", "169.254.169.254", "0.0.0.0", "[::]")
        ),
        ("http://[::ffff:10.0.0.1]/", ["*"]),
        ("https://192.168.1.1/", ["10.0.0.0/8"]),
    ],
)
def test_other_hosts_are_refused_alike(url: str, rules: list[str]) -> None:
    words = refusal(url, *rules)
    assert words.startswith("part: ")
    assert words.endswith("its host is none that images may come from")


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://pictures.example.com/",
        "http:/pictures.example.com",
        "http://pictures.example.com\\@10.0.0.1/",
        "http://pictures.example.com/a b",
        "http://pictures.example.com/\r\nHost: evil",
        "http://pіctures.example.com/",  # noqa: RUF001 - a Cyrillic letter
        "http://bücher.example.com/",
        "http://１２７.0.0.1/",  # noqa: RUF001 - digits that name servers would take
        "http://127%2e0.0.1/",
        "gopher://127.0.0.1/",
        "",
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    assert "must be a data: URL, or one of http(s)://" in refusal(url, "*")


def test_without_an_allow_list_nothing_is_fetched() -> None:
    words = refusal("http://pictures.example.com/")
    assert "images are fetched from no host (IMAGE_HOSTS)" in words


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(status: int) -> None:
    with host(whole(image())) as (other, others):
        to = f"Location: http://127.0.0.1:{other}/\r\n"
        with host(whole(b"", f"{status} Moved", to)) as (port, heads):
            words = refusal(f"http://127.0.0.1:{port}/", "127.0.0.1")
            assert f"answered {status}; redirects are not followed" in words
            assert len(heads) == 1
        assert not others


def test_a_name_is_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second answer of a name server that rebinds would be another."""
    answers = iter([["127.0.0.1"], ["10.0.0.1"]])
    with host(whole(image())) as (port, _):
        made = ImageFetcher(("127.0.0.1",), lambda _: next(answers))
        url = f"http://rebinding.example.com:{port}/"
        assert made.fetch("part", url, 1 << 20, time.monotonic() + 60) == image()
    assert next(answers) == ["10.0.0.1"]


def test_an_answer_that_is_too_long_is_cut_off() -> None:
    sent = threading.Event()

    def endless(connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                connection.sendall(bytes(1 << 16))
        finally:
            sent.set()

    with host(endless) as (port, _):
        words = refusal(f"http://127.0.0.1:{port}/", "127.0.0.1", most=1 << 20)
        assert "more than 1048576 bytes" in words
        assert sent.wait(60)


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\nabc"])
def test_a_slow_host_is_left_at_the_deadline(start: bytes) -> None:
    stop = threading.Event()

    def slow(connection: socket.socket, _: bytes) -> None:
        connection.sendall(start)
        while not stop.wait(0.02):
            connection.sendall(b"a")

    with host(slow) as (port, _):
        words = refusal(f"http://127.0.0.1:{port}/", "127.0.0.1", timeout=0.3)
        stop.set()
    assert "took more than 0.3 s" in words


def test_no_port_and_no_tls_are_refused() -> None:
    assert "cannot be fetched" in refusal("http://127.0.0.1:99999/", "127.0.0.1")
    with host(whole(image())) as (port, _):
        assert "cannot be fetched: Connect" in refusal(f"https://127.0.0.1:{port}/", "127.0.0.1")
