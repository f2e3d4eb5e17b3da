"""The server process: its start, and its end with a Cog that has started it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cog_triton.serving import server
from cog_triton.serving.server import Server


@pytest.mark.parametrize("for_cog", [True, False])
def test_a_start_that_fails_has_a_code_and_is_logged_where_no_cog_does(
    for_cog: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise KeyError("nothing")

    async def main() -> dict[str, Any]:
        failing = Server("none", None)
        failing._setup_log.for_cog = for_cog
        start = asyncio.ensure_future(fail())
        await asyncio.wait({start})
        failing._on_start(start)
        return failing._health()

    health = asyncio.run(main())
    error = "E2100 TritonUnknownError: internal error: KeyError"
    assert health == {"status": "SETUP_FAILED", "setup": {"logs": error}}
    assert [each.getMessage() for each in caplog.records][1:] == [error][for_cog:]


def test_a_drain_follows_once_cog_listens_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    answers = iter([[5000], OSError("no file descriptor is left"), [5000], []])

    def look(port: int) -> Iterator[int]:
        seen.append(answer := next(answers))
        if isinstance(answer, OSError):
            raise answer
        return iter(answer)

    async def main() -> None:
        serving: Any = Server("none", None)
        serving._runtime = SimpleNamespace(drain=lambda: seen.append("drained"))
        await serving._drain_with_cog(5000)

    monkeypatch.setattr(server, "listening_sockets", look)
    asyncio.run(main())
    assert [str(each) for each in seen][2:] == ["[5000]", "[]", "drained"]
