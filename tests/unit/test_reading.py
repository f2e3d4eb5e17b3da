"""A blocking iterator, read for an event loop: nothing is lost, doubled or out of order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from threading import Event

import pytest

from cog_triton.serving.reading import Reading


async def all_of(reading: Reading[int]) -> list[int]:
    found: list[int] = []
    while (items := await reading.next()) is not None:
        assert items
        found += items
    return found


@pytest.mark.parametrize("pause", [None, 0, 0.0003])
def test_everything_arrives_once_and_in_order(pause: float | None) -> None:
    def items() -> Iterator[int]:
        for number in range(500):
            if pause is not None:
                time.sleep(pause)
            yield number

    async def read() -> None:
        reading = Reading(items)
        assert await all_of(reading) == list(range(500))
        assert reading.ended
        assert await reading.next() is None

    asyncio.run(read())


def test_what_arrives_while_nobody_looks_comes_together() -> None:
    async def read() -> list[int] | None:
        read_on, done = Event(), Event()

        def items() -> Iterator[int]:
            yield from range(10)
            done.set()
            read_on.wait()

        reading = Reading(items)
        await asyncio.to_thread(done.wait)
        found = await reading.next()
        assert not reading.ended
        read_on.set()
        assert await reading.next() is None
        return found

    assert asyncio.run(read()) == list(range(10))


def test_an_error_comes_after_what_was_read_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("broken")

    async def read() -> None:
        reading = Reading(items)
        assert await reading.next() == [1]
        with pytest.raises(ValueError, match="broken"):
            await reading.next()

    asyncio.run(read())


def test_nothing_within_the_time_is_an_empty_list() -> None:
    async def read() -> None:
        go = Event()

        def items() -> Iterator[int]:
            go.wait()
            yield 7

        reading = Reading(items)
        assert await reading.next(0.01) == []
        go.set()
        assert await reading.next() == [7]

    asyncio.run(read())


def test_a_loop_that_has_ended_does_not_disturb_the_reader() -> None:
    go, ended = Event(), Event()

    def items() -> Iterator[int]:
        try:
            go.wait()
            yield 1
            yield 2
        finally:
            ended.set()

    async def leave() -> None:
        Reading(items)

    asyncio.run(leave())
    go.set()
    assert ended.wait(5)
