"""Downloads from a real HTTP server with planned faults."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from range_server import Content, Fault, FileServer, Span, answering, serving_file

from cog_triton.download import disk_space, partial_file
from cog_triton.download.retry import RetryPolicy
from cog_triton.download.url_download import fetch, size
from cog_triton.errors import BuildCancelled, DiskFull, ModelUnavailable
from cog_triton.system.ports import free_ports

PIECE = 64 << 10
CONTENT = Content(20 * PIECE + 123)
FAST = RetryPolicy(max_failures=5, initial_s=0.001, max_s=0.01)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_file, "PIECE", PIECE)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "model.tar"


@pytest.fixture
def server() -> Iterator[FileServer]:
    with serving_file(CONTENT) as running:
        yield running


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def get(server: FileServer, target: Path, **options: Any) -> list[str]:
    """The lines told while the file was fetched."""
    lines: list[str] = []
    options = {"retry": FAST, "echo": lines.append, **options}
    assert fetch(f"{server.url}/dir/model.tar?key=hunter2", target, **options) == target
    assert target.read_bytes() == CONTENT.whole()
    assert names(target.parent) == [target.name]
    assert "hunter2" not in "".join(lines)
    return lines


def refused(server: FileServer, target: Path, **options: Any) -> str:
    """What is said of a file that cannot be had."""
    lines: list[str] = []
    with pytest.raises(ModelUnavailable) as caught:
        fetch(
            f"{server.url.replace('//', '//user:hunter2@')}/dir/model.tar?key=hunter2",
            target,
            **{"retry": FAST, "echo": lines.append, **options},
        )
    said = str(caught.value)
    assert f"{server.url}/dir/model.tar" in said
    assert "hunter2" not in said + "".join(lines)
    assert not target.exists()
    return said


def parts(server: FileServer) -> list[Span]:
    """The ranges asked for, but the first byte that shows whether ranges work."""
    return [span for span in server.requests if span is not None and span != (0, 1)]


def test_pieces_are_fetched_in_parallel(server: FileServer, target: Path) -> None:
    lines = get(server, target, sha256=CONTENT.sha256().upper())
    starts = range(0, CONTENT.size, PIECE)
    assert sorted(parts(server)) == [(at, min(at + PIECE, CONTENT.size)) for at in starts]
    assert {request.headers["Accept-Encoding"] for request in server.seen} == {"identity"}
    assert any("model.tar 1 MB in" in line for line in lines)


def test_an_existing_target_is_not_fetched_again(server: FileServer, target: Path) -> None:
    get(server, target)
    before = len(server.requests)
    get(server, target)
    get(server, target, sha256=CONTENT.sha256())
    assert len(server.requests) == before
    target.write_text("another")
    assert any("another sha256" in line for line in get(server, target, sha256=CONTENT.sha256()))


def every(*faults: Fault | None) -> Callable[[int, Span | None], Fault | None]:
    """The faults one after the other, for all requests but the first, over and over."""
    turn = itertools.cycle(faults)
    lock = threading.Lock()

    def plan(number: int, _span: Span | None) -> Fault | None:
        with lock:
            return next(turn) if number else None

    return plan


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=500),
        Fault(status=503, headers={"Retry-After": "0"}),
        Fault(status=429, headers={"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}),
        Fault(status=408, headers={"Retry-After": "soon"}),
        Fault(reset_after=1000),
        Fault(reset_after=0),
        Fault(close_after=1000),
        Fault(ignore_range=True),
        Fault(shift=10),
        Fault(shorten=60_000),
        Fault(headers={"Content-Length": "70000"}, close_after=65_000),
    ],
)
def test_transient_faults_are_retried(server: FileServer, target: Path, fault: Fault) -> None:
    server.plan = every(fault, None)
    get(server, target, connections=2)
    assert len(server.requests) > 21


def test_a_cut_piece_is_resumed_where_it_ended(server: FileServer, target: Path) -> None:
    server.plan = lambda number, _: Fault(reset_after=1000) if number == 1 else None
    get(server, target, connections=1)
    assert sum(stop - start for start, stop in parts(server)) == CONTENT.size + PIECE - 1000


def test_bytes_beyond_the_requested_range_are_not_written(target: Path) -> None:
    def answer(request: Any) -> None:
        start, stop = (int(n) for n in request.headers["Range"][6:].split("-"))
        request.send_response(206)
        request.send_header("ETag", '"one"')
        request.send_header("Content-Range", f"bytes {start}-{stop}/{CONTENT.size}")
        end = min(start + 2 * PIECE, CONTENT.size)
        request.send_header("Content-Length", str(end - start))
        request.end_headers()
        for chunk in CONTENT.read(start, end):
            request.wfile.write(chunk)

    with answering(answer) as url:
        fetch(f"{url}/m.tar", target, echo=lambda _: None, retry=FAST)
    assert target.read_bytes() == CONTENT.whole()


@pytest.mark.parametrize("with_length", [True, False])
def test_a_server_without_ranges_is_read_in_one_stream(
    server: FileServer, target: Path, with_length: bool
) -> None:
    server.ranges, server.with_length = False, with_length
    if with_length:  # else a cut cannot be seen
        server.plan = lambda number, _: Fault(reset_after=PIECE * number) if number < 3 else None
    get(server, target)
    assert len(server.requests) == (4 if with_length else 1)


def test_without_a_validator_the_file_comes_in_one_stream(server: FileServer, target: Path) -> None:
    server.etag = 'W/"weak"'
    get(server, target)
    assert server.requests == [(0, 1), None]
    target.unlink()
    get(server, target, sha256=CONTENT.sha256())  # but this would show it
    assert len(parts(server)) == 21


def test_last_modified_is_a_validator(server: FileServer, target: Path) -> None:
    server.etag, server.modified = None, "Wed, 21 Oct 2015 07:28:00 GMT"
    get(server, target)
    assert len(parts(server)) == 21


def test_an_empty_file_is_fetched(target: Path) -> None:
    with serving_file(Content(0)) as server:
        assert fetch(f"{server.url}/m", target, echo=lambda _: None, retry=FAST).read_bytes() == b""


def test_a_file_that_changes_is_started_over(server: FileServer, target: Path) -> None:
    old = Content(CONTENT.size, seed=1)
    server.content, server.etag = old, '"old"'

    def plan(number: int, _span: Span | None) -> None:
        if number == 5:
            server.content, server.etag = CONTENT, '"new"'

    server.plan = plan
    lines = get(server, target, connections=1)
    assert len([line for line in lines if "has changed; starting over" in line]) == 1
    assert parts(server)[-21:] == sorted(parts(server)[-21:])


def test_differing_mirrors_end_in_one_stream(server: FileServer, target: Path) -> None:
    server.plan = lambda number, _: Fault(headers={"ETag": f'"{number}"'})
    get(server, target)
    assert server.requests[-1] is None


@pytest.mark.parametrize(
    ("status", "says"),
    [(401, "not authorised"), (403, "may have expired"), (404, "no such file"), (410, "for good")],
)
def test_permanent_http_errors_fail_at_once(
    server: FileServer, target: Path, status: int, says: str
) -> None:
    server.plan = lambda *_: Fault(status=status)
    said = refused(server, target)
    assert f"HTTP {status}" in said
    assert says in said
    assert len(server.requests) == 1


def test_retries_end_without_progress(server: FileServer, target: Path) -> None:
    server.plan = lambda *_: Fault(status=503)
    assert "HTTP 503 Service Unavailable (5 attempts without progress)" in refused(server, target)
    assert len(server.requests) == 5


def test_retries_go_on_while_there_is_progress(server: FileServer, target: Path) -> None:
    server.plan = every(Fault(reset_after=PIECE // 8))
    get(server, target, connections=1)
    assert len(server.requests) > 100


def left_after_ten(server: FileServer, target: Path) -> None:
    """A download that ended after ten pieces; what is asked from now on is counted anew."""
    server.plan = lambda number, _: Fault(status=500) if number > 10 else None
    refused(server, target, connections=1)
    server.plan = lambda *_: None
    server.requests.clear()


def test_finished_pieces_stay_when_retries_end(server: FileServer, target: Path) -> None:
    left_after_ten(server, target)
    lines = get(server, target)
    assert any("going on after 10 pieces" in line for line in lines)
    assert len(parts(server)) == 11


def test_pieces_of_another_file_are_dropped(server: FileServer, target: Path) -> None:
    server.content = Content(CONTENT.size, seed=1)
    left_after_ten(server, target)
    server.content, server.etag = CONTENT, '"two"'
    assert any("has changed; starting over" in line for line in get(server, target))
    assert len(parts(server)) == 21


@pytest.mark.parametrize("damage", ["", "junk\n", '{"size": 1}\n', "cut"])
def test_a_damaged_journal_is_ignored(server: FileServer, target: Path, damage: str) -> None:
    left_after_ten(server, target)
    journal = target.with_name("model.tar.partial.journal")
    text = journal.read_text()
    journal.write_text(text[:-2] + "1" if damage == "cut" else damage)
    get(server, target, sha256=CONTENT.sha256())
    assert len(parts(server)) == (12 if damage == "cut" else 21)


def test_a_refused_connection_and_an_unknown_host_fail_after_retries(target: Path) -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}/m.tar"
    with pytest.raises(ModelUnavailable, match=r"m\.tar: unreachable: .*refused.*5 attempts"):
        fetch(url, target, echo=lambda _: None, retry=FAST)
    with pytest.raises(ModelUnavailable, match="unreachable"):
        fetch("http://no-such-host.invalid/m", target, echo=lambda _: None, retry=FAST)


def test_credentials_are_not_sent_to_another_host(server: FileServer, target: Path) -> None:
    seen: list[str | None] = []

    def redirect(request: Any) -> None:
        seen.append(request.headers["Authorization"])
        request.send_response(302)
        request.send_header("Location", server.url.replace("127.0.0.1", "localhost") + "/m")
        request.send_header("Content-Length", "0")
        request.end_headers()

    with answering(redirect) as url:
        fetch(
            f"{url}/m",
            target,
            headers={"Authorization": "Bearer hunter2"},
            echo=lambda _: None,
            retry=FAST,
        )
    assert set(seen) == {"Bearer hunter2"}
    assert {request.headers["Authorization"] for request in server.seen} == {None}


def test_a_wrong_checksum_is_refused_and_leaves_nothing(server: FileServer, target: Path) -> None:
    said = refused(server, target, sha256="0" * 64)
    assert CONTENT.sha256() in said
    assert "0" * 64 in said
    assert names(target.parent) == []


def test_size_never_raises(server: FileServer) -> None:
    assert size(f"{server.url}/m") == CONTENT.size
    server.ranges = False
    assert size(f"{server.url}/m") == CONTENT.size
    server.with_length = False
    assert size(f"{server.url}/m") is None
    for url in (f"http://127.0.0.1:{free_ports(1)[0]}/m", "http://[::1/", "ftp://h/m", "/no/file"):
        assert size(url) is None


def test_a_stopped_download_is_resumed(server: FileServer, target: Path) -> None:
    stop = threading.Event()

    def plan(number: int, _span: Span | None) -> None:
        if number == 8:
            stop.set()

    server.plan = plan
    with pytest.raises(BuildCancelled, match=r"model\.tar: the download was stopped"):
        fetch(f"{server.url}/model.tar", target, echo=lambda _: None, connections=1, stop=stop)
    assert not target.exists()
    before = len(parts(server))
    get(server, target)
    assert len(parts(server)) - before < 21


def test_memory_does_not_grow_with_the_file(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_file, "PIECE", 16 << 20)
    content = Content(160 << 20)
    with serving_file(content) as server:
        tracemalloc.start()
        fetch(f"{server.url}/m", target, sha256=content.sha256(), echo=lambda _: None)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
        tracemalloc.stop()


CHILD = """
import sys
from pathlib import Path
from cog_triton.download import partial_file, retry, url_download
partial_file.PIECE = int(sys.argv[3])
fast = retry.RetryPolicy(initial_s=0.001)
def echo(line):
    print(line, flush=True)
url_download.fetch(sys.argv[1], Path(sys.argv[2]), retry=fast, connections=1, echo=echo)
"""


@contextmanager
def child(url: str, target: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that fetches."""
    command = [sys.executable, "-c", CHILD, url, str(target), str(PIECE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def silent_at(server: FileServer, request: int) -> tuple[threading.Event, threading.Event]:
    """Have `server` fall silent at a request: events that it has, and that it is to go on."""
    reached, hold = threading.Event(), threading.Event()

    def plan(number: int, _span: Span | None) -> None:
        if number == request:
            reached.set()
            hold.wait(60)

    server.plan = plan
    return reached, hold


def test_finished_pieces_survive_sigkill(server: FileServer, target: Path) -> None:
    reached, hold = silent_at(server, 12)
    with child(f"{server.url}/m.tar", target) as process:
        assert reached.wait(30)
        process.kill()
        process.wait()
    hold.set()
    assert not target.exists()
    before = parts(server)
    server.plan = lambda *_: None
    server.requests.clear()
    get(server, target)
    assert len(before) == 12
    # The twelfth was under way, all before it were done.
    assert sorted(parts(server)) == sorted(set(parts(server)) - set(before[:11]))
    assert len(parts(server)) == 21 - 11


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_does_not_wait_for_a_silent_server(
    server: FileServer, target: Path, number: int
) -> None:
    reached, hold = silent_at(server, 12)
    with child(f"{server.url}/m.tar", target) as process:
        assert reached.wait(30)
        process.send_signal(number)
        assert process.wait(30) != 0
        assert not hold.is_set()
    hold.set()
    server.requests.clear()
    get(server, target)
    assert len(parts(server)) == 21 - 11


def test_a_second_process_waits_for_the_first(server: FileServer, target: Path) -> None:
    reached, hold = silent_at(server, 3)
    with child(f"{server.url}/m.tar", target) as first:
        assert reached.wait(30)
        with child(f"{server.url}/m.tar", target) as second:
            assert second.stdout is not None
            assert "another process is fetching it; waiting" in second.stdout.readline()
            hold.set()
            assert first.wait(30) == 0
            assert second.wait(30) == 0
    assert target.read_bytes() == CONTENT.whole()
    assert len(parts(server)) == 21
    assert names(target.parent) == [target.name]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_too_small_disk_is_refused_before_the_download(small_disk: Path, ranges: bool) -> None:
    with serving_file(Content(20_000_000)) as server:
        server.ranges = ranges
        with pytest.raises(DiskFull, match=r"needs 20 MB more .* has 8 MB free"):
            fetch(f"{server.url}/m", small_disk / "m", echo=lambda _: None)
        assert len(server.requests) == 1
    assert not (small_disk / "m").exists()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_disk_that_fills_up_is_disk_full(
    small_disk: Path, ranges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving_file(Content(20_000_000)) as server:
        server.ranges, server.with_length = ranges, ranges
        if ranges:  # as when others fill the disk after the check
            monkeypatch.setattr(disk_space, "require", lambda *_: None)
        with pytest.raises(DiskFull, match=f"{small_disk} is full"):
            fetch(f"{server.url}/m", small_disk / "m", echo=lambda _: None)
    assert not (small_disk / "m").exists()
    if not ranges:
        assert names(small_disk) == []


def test_an_unwritable_target_is_refused(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelUnavailable, match="cannot be written"):
        fetch(f"{server.url}/m", tmp_path / "file" / "m", echo=lambda _: None)
