"""Responses that a store keeps, in a file or on a server: what the tests of both do."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from cog_triton.errors import NotFound
from cog_triton.serving.openai.response_book import RUNNING, ResponseBook
from cog_triton.serving.openai.response_store import Recording, ResponseStore

EVENT = b"event: a\ndata: {}\n\n"
LIVES = """
import asyncio, sys
from cog_triton.serving.openai.response_store import Recording, ResponseStore

async def main():
    store = ResponseStore(book, 8, 60)
    for name in sys.argv[1:]:
        recording = Recording(name, "", None, "[]", True)
        await store.begin(recording, {"id": name, "status": "in_progress", "output": []})
        for number in range(5):
            store.append(recording, b"event: a\\ndata: %d\\n\\n" % number)
    while store.events(sys.argv[-1], 0).number < 5:
        await asyncio.sleep(0.01)
    print("written", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@contextmanager
def kept_in(book: ResponseBook) -> Iterator[ResponseStore]:
    store = ResponseStore(book, 8, 60)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def worker(setup: str, *names: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that makes these responses, and has written five events of each.

    `setup` is the source text that defines its `book`.
    """
    command = [sys.executable, "-c", setup + LIVES, *names]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"written\n"
            yield process
        finally:
            process.kill()


def keep(store: ResponseStore, name: str, tenant: str = "", length: int = 0) -> None:
    body = {"id": name, "status": "completed", "output": [], "text": "x" * length}
    asyncio.run(store.keep(Recording(name, tenant, None, "[]", False), body))


def has(store: ResponseStore, name: str, tenant: str = "") -> bool:
    try:
        return bool(store.read(name, tenant).told()["id"] == name)
    except NotFound:
        return False


def kill_the_worker_of(
    store: ResponseStore,
    process: subprocess.Popen[bytes],
    failed: Callable[[Callable[[], bool]], object],
) -> None:
    """Response `a` of a killed worker is failed, as soon as `failed` sees it, and can be read."""
    assert store.read("a", "").status == RUNNING
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert failed(lambda: store.read("a", "").status == "failed")
    message = store.read("a", "").told()["error"]["message"]
    assert message.startswith("E2105 TritonUnavailable: the server")
    events = store.events("a", 2)
    assert (events.data.count(b"\n\n"), events.number, events.status) == (3, 3, "failed")
    assert events.data.startswith(b"event: a\ndata: 2")


def fill_until_the_oldest_go(opened: AbstractContextManager[ResponseStore]) -> None:
    """In a store of 10 kB, who has least keeps it; of who has most, the oldest ones go."""
    with opened as store:
        keep(store, "mine", "small", 2000)
        for number in range(20):
            keep(store, f"{number}", "large", 2000)
        assert has(store, "mine", "small")
        assert not has(store, "mine", "large")
        left = [number for number in range(20) if has(store, f"{number}", "large")]
        assert left == list(range(20 - len(left), 20))
        assert 2 <= len(left) <= 4
