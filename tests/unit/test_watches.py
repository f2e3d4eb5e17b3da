"""Watches over processes that cannot look for a while: no file descriptor is left, for example."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
from small_front import on_loop, until

from cog_triton.processes import child


@pytest.mark.parametrize("mends", [False, True])
@on_loop
async def test_a_watch_knows_its_last_look(monkeypatch: pytest.MonkeyPatch, mends: bool) -> None:
    looks: list[int] = []

    def read(root: int) -> set[int]:
        looks.append(root)
        if len(looks) > 1:
            raise OSError("no file descriptor is left")
        return {sleeping.pid}

    monkeypatch.setattr(child.reaper, "descendants", read)
    it: Any = SimpleNamespace(pid=os.getpid(), ended=asyncio.Future(), wait=asyncio.sleep)
    monkeypatch.setattr(child, "_PERIOD_S", 0.01)
    with subprocess.Popen(["sleep", "60"]) as sleeping:
        watching = asyncio.ensure_future(child.watch("it", it, mends=mends))
        await until(lambda: len(looks) == 3 or watching.done())
        sleeping.send_signal(signal.SIGSTOP)
        await until(lambda: watching.done() or sleeping.poll() is not None)
        assert mends or await watching == f"process {sleeping.pid} of it was stopped"
        watching.cancel()
        sleeping.kill()
