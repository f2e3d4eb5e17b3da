"""Control socket of the front door: commands, their progress, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from small_door import run, until

from cog_triton.door.control import Command, ControlSocket, Progress, Send, ask, control_name
from cog_triton.errors import EngineCorrupt, RollFailed
from cog_triton.system import local_socket

PORT = 100_000 + os.getpid()  # no TCP port: only a name


async def echoing(command: Command, send: Send, left: asyncio.Event) -> Progress:
    send(Progress(say=f"rolling to {command.label}"))
    return Progress(say="rolled", done=True)


def serving(check: Callable[[], Awaitable[None]], handle: Any = echoing) -> None:
    async def main() -> None:
        control = ControlSocket(PORT, handle)
        try:
            await check()
        finally:
            await control.close()

    run(main())


def test_a_command_is_answered_by_lines_of_progress() -> None:
    async def check() -> None:
        command = Command(command="roll", label="b")
        answers = await asyncio.to_thread(lambda: list(ask(PORT, command)))
        assert [answer.say for answer in answers] == ["rolling to b", "rolled"]

    serving(check)


def test_a_failure_keeps_its_code() -> None:
    async def failing(command: Command, send: Send, left: asyncio.Event) -> Progress:
        raise EngineCorrupt("not an engine")

    async def check() -> None:
        with pytest.raises(EngineCorrupt, match="not an engine"):
            await asyncio.to_thread(lambda: list(ask(PORT, Command(command="roll"))))

    serving(check, failing)


def test_a_client_that_leaves_is_noticed() -> None:
    noticed = asyncio.Event()

    async def waiting(command: Command, send: Send, left: asyncio.Event) -> Progress:
        send(Progress(say="begun"))
        await left.wait()
        noticed.set()
        return Progress(done=True)

    async def check() -> None:
        answers = ask(PORT, Command(command="roll"))
        assert (await asyncio.to_thread(next, answers)).say == "begun"
        answers.close()  # type: ignore[attr-defined]
        await until(noticed.is_set)

    serving(check, waiting)


@pytest.mark.parametrize("line", [b"{}\n", b"nonsense\n", b'{"command":"stop"}\n'])
def test_what_is_no_command_is_refused(line: bytes) -> None:
    def said() -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as own:
            own.connect(local_socket.address(control_name(PORT)))
            own.sendall(line)
            with own.makefile("rb") as answers:
                found: dict[str, Any] = json.loads(answers.readline())
                return found

    async def check() -> None:
        assert (await asyncio.to_thread(said))["error"].startswith("E2113")

    serving(check)


def test_a_client_that_says_nothing_holds_nothing_up() -> None:
    async def check() -> None:
        with socket.socket(socket.AF_UNIX) as own:
            own.connect(local_socket.address(control_name(PORT)))
            assert await asyncio.to_thread(lambda: list(ask(PORT, Command(command="status"))))

    serving(check)


def test_without_a_server_the_reason_is_told() -> None:
    with pytest.raises(RollFailed, match=f"port {PORT}: Connection refused"):
        list(ask(PORT, Command(command="status")))


def test_a_second_door_of_one_port_serves_without_a_control_socket(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def check() -> None:
        second = ControlSocket(PORT, echoing)
        assert "`cog-triton roll` is off" in caplog.text
        await second.close()

    serving(check)
