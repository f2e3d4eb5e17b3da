"""Asynchronous stream reader: no item is lost, duplicated or reordered."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Generator, Iterator

import pytest

from cog_triton.triton.asyncio_stream import AsyncStreamReader

PATIENCE_S = 10


class Line:
    """A connection of which each byte is an item; the test writes them."""

    def __init__(self, timeout: float = PATIENCE_S) -> None:
        self.timeout = timeout
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._expired = False
        self.closed = threading.Event()
        self.threads: set[int] = set()
        self.reads = 0

    def fileno(self) -> int:
        return self._ours.fileno()

    def expire(self) -> None:
        self._expired = True

    def send(self, *items: int) -> None:
        self._theirs.sendall(bytes(items))

    def abort(self) -> None:
        self._theirs.close()

    def items(self) -> Generator[int | None, None, None]:
        """Begins with a blocking read, as a stream that waits for its turn does."""
        try:
            with self._ours, self._theirs:
                yield from self._all()
        finally:
            self.closed.set()

    def _all(self) -> Iterator[int | None]:
        self._ours.setblocking(True)
        first = self._ours.recv(1)
        self._ours.setblocking(False)
        yield from first
        while True:
            yield None
            if self._expired:
                raise TimeoutError("nothing came")
            self.threads.add(threading.get_ident())
            self.reads += 1
            try:
                found = self._ours.recv(100)
            except BlockingIOError:
                continue
            if not found:
                return
            for item in found:
                if item == 255:
                    raise ValueError("broken")
                yield item


def reading_of(line: Line) -> AsyncStreamReader[int]:
    return AsyncStreamReader(line.items(), lambda: line)


async def all_of(reading: AsyncStreamReader[int]) -> list[int]:
    found: list[int] = []
    while (items := await reading.read()) is not None:
        assert items
        found += items
    return found


@pytest.mark.parametrize("pause", [None, 0, 0.0003])
def test_items_arrive_once_and_in_order(pause: float | None) -> None:
    line = Line()

    def write() -> None:
        for number in range(500):
            if pause is not None:
                time.sleep(pause)
            line.send(number % 100)
        line.abort()

    async def read() -> None:
        reading = reading_of(line)
        threading.Thread(target=write).start()
        assert await all_of(reading) == [number % 100 for number in range(500)]
        assert reading.ended
        assert await reading.read() is None

    asyncio.run(read())
    assert line.closed.is_set()


def test_event_loop_reads_only_when_data_has_arrived() -> None:
    line = Line()

    async def read() -> None:
        reading = reading_of(line)
        line.send(1)
        assert await reading.read() == [1]
        for number in range(5):
            await asyncio.sleep(0.01)
            line.send(number)
            assert await reading.read() == [number]
        line.abort()
        assert await reading.read() is None

    asyncio.run(read())
    assert line.threads == {threading.get_ident()}
    assert line.reads == 6


def test_many_streams_are_read_concurrently() -> None:
    async def read() -> None:
        lines = [Line() for _ in range(50)]
        readings = [reading_of(line) for line in lines]
        for number in range(20):
            for place, line in enumerate(lines):
                line.send((number + place) % 100)
        for line in lines:
            line.abort()
        for place, reading in enumerate(readings):
            assert await all_of(reading) == [(number + place) % 100 for number in range(20)]

    asyncio.run(read())


def test_unread_items_come_as_one_list() -> None:
    async def read() -> list[int] | None:
        line = Line()
        reading = reading_of(line)
        for number in range(10):
            line.send(number)
            await asyncio.sleep(0.01)
        found = await reading.read()
        assert not reading.ended
        line.abort()
        assert await reading.read() is None
        return found

    assert asyncio.run(read()) == list(range(10))


@pytest.mark.parametrize("first", [1, 255])
def test_error_comes_after_items_read_before_it(first: int) -> None:
    async def read() -> None:
        line = Line()
        reading = reading_of(line)
        line.send(7, first, 255)
        wanted = [7, 1] if first == 1 else [7]
        found: list[int] = []
        while len(found) < len(wanted):
            found += await reading.read() or []
        assert found == wanted
        with pytest.raises(ValueError, match="broken"):
            await reading.read()
        assert reading.ended
        assert line.closed.is_set()

    asyncio.run(read())


def test_error_before_the_first_pause_is_raised() -> None:
    def items() -> Generator[int | None, None, None]:
        raise ValueError("refused")
        yield None

    def connection() -> Line:
        raise AssertionError("there is none")

    async def read() -> None:
        with pytest.raises(ValueError, match="refused"):
            await AsyncStreamReader(items(), connection).read()

    asyncio.run(read())


def test_read_timeout_returns_an_empty_list() -> None:
    async def read() -> None:
        line = Line()
        reading = reading_of(line)
        assert await reading.read(0.01) == []
        line.send(7)
        assert await reading.read() == [7]
        assert await reading.read(0.01) == []
        line.abort()
        assert await reading.read() is None

    asyncio.run(read())


def test_silent_connection_expires_after_its_timeout() -> None:
    async def read() -> None:
        line = Line(timeout=0.4)
        reading = reading_of(line)
        for number in range(5):
            line.send(number)
            assert await reading.read() == [number]
            await asyncio.sleep(0.1)
        with pytest.raises(TimeoutError, match="nothing came"):
            await reading.read()
        assert line.closed.is_set()

    asyncio.run(read())


def test_reused_file_descriptor_belongs_to_the_new_stream() -> None:
    async def read() -> None:
        descriptors = set()
        for number in range(50):
            line = Line()
            descriptors.add(line.fileno())
            reading = reading_of(line)
            line.send(number)
            assert await reading.read() == [number]
            line.abort()
            assert await reading.read() is None
            assert line.closed.is_set()
        assert len(descriptors) < 50

    asyncio.run(read())


@pytest.mark.parametrize("begun", [False, True])
def test_closed_event_loop_closes_the_items(begun: bool) -> None:
    line = Line()

    async def leave() -> None:
        reading = reading_of(line)
        if begun:
            line.send(1)
            assert await reading.read() == [1]

    asyncio.run(leave())
    if not begun:
        line.send(1)
    gc.collect()
    assert line.closed.wait(PATIENCE_S)
