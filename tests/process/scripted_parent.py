"""A parent in a process of its own, or a stand-in for its server, which clients script."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import logging
import os
import signal
import sys
from typing import Any

from cog_triton import errors
from cog_triton.processes import child, orders, parent
from cog_triton.processes.parent_link import ParentLink
from cog_triton.settings import load_settings
from cog_triton.system.ports import bound, received
from cog_triton.system.shared_time import SharedTime


async def run(script: str, cog: str, stays: bool, constants: Any, settings: Any) -> None:
    """Be the parent; the first line is its port."""
    child._PERIOD_S = 0.05
    for name, value in {"_SERVER": "scripted_parent", **constants}.items():
        setattr(parent, name, value)
    with bound({"PORT": ("127.0.0.1", 0)}) as sockets:
        print(sockets["PORT"].getsockname()[1], flush=True)
        environment = {**os.environ, "SCRIPT": script}
        programs = parent.Programs((), environment, ["sh", "-c", cog] if cog else [], os.environ)
        await parent.Parent(
            load_settings(**settings),
            sockets,
            programs,
            stays=stays,
            on_ready=lambda seconds, message: print(message, seconds > 0, flush=True),
            on_stop=lambda: print("stops", flush=True),
        ).run()


async def serve() -> None:
    """Be the server: evaluate SCRIPT, then each line of a client."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", action="append")
    parser.add_argument("--private")
    parser.add_argument("--due", type=int)
    options = parser.parse_args()
    sockets, names = received(options.listen), {**vars(errors), **vars(orders), **globals()}
    names |= {"due": SharedTime(options.due), "private": options.private}
    names["link"] = await ParentLink.of(sockets.pop("parent"))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, os._exit, 0)

    async def obey(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            answer = eval(line, names)
            answer = await answer if inspect.isawaitable(answer) else answer
            writer.write(json.dumps(answer).encode() + b"\n")

    eval(os.environ["SCRIPT"], names)
    await (await asyncio.start_server(obey, sock=sockets["PORT"])).serve_forever()


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    try:
        given = sys.argv[1]
        asyncio.run(run(**json.loads(given)) if given.startswith("{") else serve())
    except errors.CogTritonError as error:
        sys.exit(str(error))
