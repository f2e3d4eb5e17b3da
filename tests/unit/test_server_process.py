"""The server process: its start, and its end with a Cog that has started it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from small_front import arguments, on_loop

from cog_triton.errors import Unauthorized
from cog_triton.front import server
from cog_triton.front.cog_state import Running
from cog_triton.front.server import Server
from cog_triton.serving.cog_messages import ADDRESS_VARIABLE
from cog_triton.serving.tenants import Tenant
from cog_triton.settings import load_settings


@asynccontextmanager
async def behind_cog(**settings: Any) -> AsyncIterator[Any]:
    """A server without a Cog; its parent stores what it reports."""
    reports: list[Any] = []
    parent: Any = SimpleNamespace(has_loaded=False, send=reports.append, reports=reports)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ADDRESS_VARIABLE, "none")
        patch.setattr(server, "listen", lambda address, obey: asyncio.sleep(0))
        made = Server(load_settings(), {}, {}, parent, arguments())
        made._settings = load_settings(**settings)
        yield made
        await made._front.close()


@pytest.mark.parametrize("for_cog", [True, False])
@on_loop
async def test_a_start_that_fails_has_a_code_and_is_logged_where_no_cog_does(
    for_cog: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise KeyError("nothing")

    async with behind_cog() as failing:
        failing._setup_log.for_cog, failing._start = for_cog, fail
        beginning = asyncio.ensure_future(failing._begin())
        await asyncio.wait({beginning})
        failing._on_begun(beginning)
        (report,) = failing._parent.reports
        error = "E2100 TritonUnknownError: internal error: KeyError"
        assert failing._health() == {"status": "SETUP_FAILED", "setup": {"logs": error}}
        assert (str(report.error), report.ends) == (error, False)
        assert caplog.messages[1:] == [error][for_cog:]


def test_a_drain_follows_once_cog_listens_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    answers = iter([[(5000, 7)], OSError("no file descriptor is left"), [(5000, 7)], [(80, 7)]])

    def look() -> Iterator[tuple[int, int]]:
        seen.append(answer := next(answers))
        if isinstance(answer, OSError):
            raise answer
        return iter(answer)

    async def main() -> None:
        async def drain() -> None:
            seen.append("drained")

        async with behind_cog() as serving:
            serving._runtime = SimpleNamespace(drain=drain)
            await serving._drain_with_cog(5000)

    monkeypatch.setattr(server, "listening_sockets", look)
    asyncio.run(main())
    assert [str(each) for each in seen][2:] == ["[(5000, 7)]", "[(80, 7)]", "drained"]


@on_loop
async def test_each_prediction_has_the_tenant_of_its_id() -> None:
    tenant = Tenant(name="a")
    async with behind_cog(cog_triton_keys="keys") as serving:
        serving._upstream.predictions = {"one": Running(tenant), "two": Running(None)}
        assert serving._tenant_of("one") is tenant
        for name in ("two", "three"):
            with pytest.raises(Unauthorized):
                serving._tenant_of(name)
    async with behind_cog() as serving:
        assert serving._tenant_of("three") is None


def test_processes_that_it_starts_get_no_key() -> None:
    names = ("COG_TRITON_API_KEY", "OPENAI_API_KEY", "COG_TRITON_KEYS", "TLS_KEY_FILE")
    shown = "import os; from cog_triton.front import server"
    shown += f"; print(server._settings().api_key, [os.environ.get(name) for name in {names}])"
    given = {**os.environ, **dict.fromkeys(names, "secret"), "TLS_CERT_FILE": "public"}
    done = subprocess.run(
        [sys.executable, "-c", shown], env=given, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"secret {[None] * 4}\n"
