"""Checks of a coding agent, as a command without a terminal, against answers of `agent_script`.

Its task: read two files, edit one, run a command of the shell, and end.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from checks import GIVEN, add, check, server, until

SCRIPTED = server("scripted")
WORK, PACKAGES = Path(GIVEN["work"]), Path(GIVEN["packages"])
HOME = WORK / "home"
MACHINE = {"x86_64": "x64", "aarch64": "arm64"}[platform.machine()]
Answer = tuple[str, str]
"""A session, and the last text in it."""


def run(*command: str | Path, **own: str) -> list[dict[str, Any]]:
    """The JSON lines that the agent prints; it sees nothing but our server."""
    HOME.mkdir(exist_ok=True)
    names = ("PATH", "NO_PROXY", "HTTP_PROXY", "HTTPS_PROXY")
    done = subprocess.run(
        command,
        env={**{name: os.environ[name] for name in names}, "HOME": str(HOME), **own},
        cwd=WORK,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.stdout, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def coding_checks(mark: str, agent: Callable[..., Answer]) -> Callable[[str], str]:
    """Add the checks of the agent with this mark in the script.

    `agent` takes a prompt, and the session that it continues. Returns the task, in a session.
    """

    def task(session: str = "") -> str:
        for name, number in (("alpha", 731), ("beta", 284)):
            (WORK / f"{name}.txt").write_text(f"{mark}-{name}-{number}\n")
        _, said = agent(f"{mark}-TASK", session)
        assert said == f"{mark} is done.", said
        assert (WORK / "beta.txt").read_text() == f"{mark}-gamma-555\n"
        return said

    add("agent loop of four tool calls", task)

    add("a session continues after a malformed call", lambda: task(agent(f"{mark}-MALFORMED")[0]))

    @check
    def all_text_comes_if_the_engine_is_killed() -> None:
        resumed = SCRIPTED.metric("resumed_total")
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(agent, f"{mark}-LONG-TEXT")
            until(SCRIPTED.engine_requests)
            SCRIPTED.kill_engine()
            said = answer.result()[1]
        assert said.split() == [str(number) for number in range(600)], said
        assert SCRIPTED.metric("resumed_total") > resumed

    return task
