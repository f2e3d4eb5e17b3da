"""Commands of the control socket, carried out by the front door."""

from __future__ import annotations

import asyncio

from cog_triton.door.control_messages import Command, Progress
from cog_triton.door.control_socket import Send
from cog_triton.door.rolling import Rolling
from cog_triton.door.upstream import Upstreams
from cog_triton.settings import Settings


class Commands:
    """Handler of a door's control socket; see `control_messages.Command` for what there is."""

    def __init__(self, settings: Settings, rolling: Rolling, upstreams: Upstreams) -> None:
        self._settings = settings
        self._rolling = rolling
        self._upstreams = upstreams

    async def __call__(self, command: Command, send: Send, left: asyncio.Event) -> Progress:
        """Carry out `command`; the last answer to it. Raises a coded error if it failed."""
        if command.command == "roll":
            last = await self._rolling.roll(command, lambda line: send(Progress(say=line)), left)
            return Progress(say=last, done=True)
        chain = self._upstreams.serving.chain
        return Progress(
            say=f"{self._upstreams.serving.name} serves",
            done=True,
            work_dir=self._settings.work_dir.resolve(),
            mock=bool(chain and chain.environment.get("COG_TRITON_ENGINE")),
            drain_timeout=self._settings.drain_timeout,
        )
