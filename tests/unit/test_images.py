"""Images of requests: limits, forms of chat templates, and URLs that may be fetched."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest
from chat_templates import LLAMA_3, QWEN
from hypothesis import given
from hypothesis import strategies as st
from image_files import FORMATS, PARTS_TEMPLATE, bomb, data_url, image, part, user
from small_tokenizers import byte_level

from cog_triton.errors import InvalidArgument
from cog_triton.pictures.image_limits import (
    ImageLimits,
    ImagePart,
    read_data_url,
    read_header,
)
from cog_triton.serving.openai.image_fetch import ImageFetcher
from cog_triton.text import chat
from cog_triton.text.chat import ImageForm, ImageURL, image_form
from cog_triton.text.tokenizer import EngineTokenizer

LIMITS = ImageLimits(count=2, size=10_000, pixels=5000)


@pytest.mark.parametrize(
    "url",
    [
        data_url(image()),
        data_url(image(), "image/jpeg"),  # the file itself says what it is
        data_url(image(), "IMAGE/PNG;charset=utf-8"),
        data_url(image(), ""),
        data_url(image()).replace("+", "%2B").replace("=", "%3d"),
        data_url(image())[:60] + "\n " + data_url(image())[60:],
    ],
)
def test_data_urls_are_read(url: str) -> None:
    assert read_data_url("a", url, LIMITS) == image()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:", "must be data:image"),
        ("data:image/png,abc", "must be data:image"),
        ("data:image/png;base64", "must be data:image"),
        ("data:text/html;base64,PGI+", "of type 'text/html'"),
        ("data:image/png;base64,abc", "no base64"),
        ("data:image/png;base64,a_-a", "no base64"),
        ("data:image/png;base64,äöüß", "no base64"),
        ("data:image/png;base64," + "A" * 20_000, "may have 10000 bytes .MAX_IMAGE_BYTES"),
        ("data:image/png;base64," + "%41" * 20_000, "may have 10000 bytes .MAX_IMAGE_BYTES"),
        ("data:image/png;base64," + "A" * 300_000, "may have 10000 bytes .MAX_IMAGE_BYTES"),
        ("data:" + "a" * 300_000, "must be data:image"),
    ],
)
def test_other_data_urls_are_refused_by_name(url: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^E1005 InvalidArgument: here: .*{words}"):
        read_data_url("here", url, LIMITS)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([b"no image"], "first: is no PNG"),
        ([image(), b"no image"], "second: is no PNG"),
        ([bomb()], "first: is of 50000x50000 pixels; .* 5000"),
        ([image(size=(60, 50)), image(size=(60, 50))], "second: is of 60x50 pixels"),
        ([image() + bytes(9999)], "first: .*10000 bytes .MAX_IMAGE_BYTES"),
        ([image() + bytes(5000), image() + bytes(5000)], "second: .*10000 bytes"),
    ],
)
def test_images_beyond_a_limit_are_refused_by_name(files: list[bytes], words: str) -> None:
    parts = [ImagePart(name, data) for name, data in zip(("first", "second"), files, strict=False)]
    with pytest.raises(InvalidArgument, match=words):
        LIMITS.check(parts)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("size", [(1, 1), (40, 30), (300, 1000)])
def test_dimensions_are_those_that_a_decoder_finds(kind: str, size: tuple[int, int]) -> None:
    assert read_header(image(kind, size)) == (kind, *size)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is no PNG, JPEG, WebP or GIF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no PNG"),
        (b"BM" + bytes(60), "is no PNG"),
        (b"II*\0" + bytes(60), "is no PNG"),
        (bomb(0, 7), "0x7 pixels"),
        (b"\xff\xd8\xff" * 100, "is broken"),
        (b"\xff\xd8" + b"\xff\xe0\0\2" * 2000, "a JPEG without a frame header"),
        (b"\xff\xd8\xff\xe0\0\0" + bytes(60), "a JPEG without a frame header"),
        (b"RIFF\0\0\0\0WEBPJUNK" + bytes(60), "a WebP without a frame header"),
    ],
)
def test_other_files_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_header(data)


@given(st.sampled_from(FORMATS), st.integers(0, 1 << 32))
def test_broken_bytes_end_with_a_value_error_or_dimensions(kind: str, seed: int) -> None:
    data, chance = bytearray(image(kind)), random.Random(seed)
    for _ in range(5):
        data[chance.randrange(min(len(data), 64))] = chance.randrange(256)
    with suppress(ValueError):
        assert read_header(bytes(data)).pixels > 0


# As those of some models: plain text is a list of characters to them.
ONLY_PARTS = (
    "{% for message in messages %}{{ message.role }}:"
    "{% for part in message.content | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}"
    "{% endfor %};{% endfor %}"
)
WRITES_THE_LIST = "{% for message in messages %}{{ message.content }}{% endfor %}"
REFUSES_LISTS = (
    "{% for m in messages %}{% if m.content is not string %}{{ raise_exception('text') }}"
    "{% endif %}{{ m.content }}{% endfor %}"
)


def tokenizer(template: str | None) -> EngineTokenizer:
    return EngineTokenizer(byte_level(), chat_template=template)


@pytest.mark.parametrize(
    ("template", "placeholder", "expected"),
    [
        (PARTS_TEMPLATE, None, ImageForm(reads_parts=True)),
        (PARTS_TEMPLATE, "<image>", ImageForm(reads_parts=True)),
        (ONLY_PARTS, None, ImageForm(reads_parts=True, only_parts=True)),
        (QWEN, "<image>", ImageForm(placeholder="<image>")),
        (LLAMA_3, "<|image_{}|>", ImageForm(placeholder="<|image_{}|>")),
        (WRITES_THE_LIST, "<image>", ImageForm(placeholder="<image>")),
        (REFUSES_LISTS, "<image>", ImageForm(placeholder="<image>")),
        (QWEN, None, None),
        (WRITES_THE_LIST, None, None),
        ("nothing of it", "<image>", None),
        ("{{ broken", "<image>", None),
        (None, "<image>", None),
    ],
)
def test_the_form_is_found_by_rendering(
    template: str | None, placeholder: str | None, expected: ImageForm | None
) -> None:
    assert image_form(tokenizer(template), placeholder) == expected


@pytest.mark.parametrize(
    ("template", "placeholder", "expected"),
    [
        (PARTS_TEMPLATE, None, "system:Be.;user:a\x01b\x01;assistant:c;user:\x01;"),
        (ONLY_PARTS, None, "system:Be.;user:<image><image>ab;assistant:c;user:<image>;"),
        (
            "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}",
            "<{}>",
            "system:Be.;user:<1>\n<2>\na\nb;assistant:c;user:<3>;",
        ),
    ],
)
def test_images_are_written_as_the_template_takes_them(
    template: str, placeholder: str | None, expected: str
) -> None:
    image = part("data:,")
    messages = [
        user("a", image, "b", image),
        {"role": "assistant", "content": "c"},
        user(image),
    ]
    made = tokenizer(template)
    form = image_form(made, placeholder)
    assert form is not None
    urls: list[ImageURL] = []
    parsed = chat.parse_messages(messages, images=urls)
    assert [url.where for url in urls] == [
        "messages[0].content[1].image_url",
        "messages[0].content[3].image_url",
        "messages[2].content[0].image_url",
    ]
    assert chat.render_messages(parsed, "Be.", made, images=form).text == expected


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
