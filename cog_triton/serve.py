"""Program of images: ``python -m cog_triton.serve [--cog-only] [arguments of cog.server.http]``.

Starts the server, Cog, Triton and engines; see `cog_triton.processes.parent`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cog_triton.errors import CogTritonError, InvalidArgument, TritonStartFailed
from cog_triton.processes.parent import Parent, Programs
from cog_triton.serving.cog_messages import ADDRESS_VARIABLE
from cog_triton.serving.coglet import cog_server
from cog_triton.settings import load_settings
from cog_triton.system import log_format
from cog_triton.system.ports import bound
from cog_triton.system.redaction import FRONT_VARIABLES

_log = logging.getLogger("cog_triton.serve")


def programs(
    environment: Mapping[str, str],
    arguments: Sequence[str] = (),
    cog_arguments: Sequence[str] = (),
    *,
    builds: bool = False,
    cwd: Path | None = None,
) -> Programs:
    """A server with Cog, in this `environment`; raises E2106 if Cog cannot do without another's.

    Without Cog's directory, another user's, the server of an engine starts without Cog.
    """
    environment = {ADDRESS_VARIABLE: f"cog-triton-{secrets.token_hex(16)}", **environment}
    try:
        cog_server.take_place()
        command = cog_server.command(cog_arguments)
    except TritonStartFailed as error:
        if builds:
            raise
        _log.warning("PORT answers 503: %s", error)
        arguments, command = [*arguments, f"--without-cog={error.detail}"], []
    for_cog = {k: v for k, v in environment.items() if k not in FRONT_VARIABLES}
    if builds:
        del for_cog[ADDRESS_VARIABLE]
    return Programs(arguments, environment, command, cog_server.environment(for_cog), cwd)


def main(arguments: Sequence[str]) -> int:
    """Serve; 0 after a stop, 1 with a coded line if the server cannot continue."""
    parser = argparse.ArgumentParser(prog="python -m cog_triton.serve", allow_abbrev=False)
    parser.add_argument("--cog-only", action="store_true", help="as for builds: no Triton")
    options, for_cog = parser.parse_known_args(arguments)
    builds = options.cog_only
    log_format.configure_from_environment("json")
    try:
        settings = load_settings()
        ports = settings.public_ports
        with bound({"PORT": ports["PORT"]} if builds else ports) as sockets:
            own = ["--cog-only"] if builds else []
            started = programs(os.environ, own, for_cog, builds=builds)
            asyncio.run(Parent(settings, sockets, started, stays=True).run(builds=builds))
    except CogTritonError as error:
        _log.error("%s", error)
        return 1
    finally:
        cog_server.leave_place()
    return 0


def behind_cog() -> int:
    """Serve for a Cog that was started by itself, without PORT; Cog gets the error of the start."""
    log_format.configure_from_environment("json")
    begun = False
    try:
        settings = load_settings()
        for name in ("cog_triton_keys", "tls_cert_file"):
            if (value := getattr(settings, name)) is not None:
                raise InvalidArgument(
                    f"{name.upper()}={value}: not for a Cog that was started alone, whose port"
                    " has neither; start the server by `cog-triton serve`"
                )
        with bound({k: at for k, at in settings.public_ports.items() if k != "PORT"}) as sockets:
            begun = True
            asyncio.run(Parent(settings, sockets, Programs((), os.environ), stays=True).run())
    except CogTritonError as error:
        if not begun:
            return asyncio.run(_refuse(error))
        _log.error("%s", error)
        return 1
    return 0


async def _refuse(error: CogTritonError) -> int:
    """Answer Cog's orders with the error, until Cog ends."""
    from cog_triton.serving.cog_socket import Exchange, listen  # which takes a second

    async def obey(order: Any, exchange: Exchange) -> None:
        raise error

    await listen(os.environ[ADDRESS_VARIABLE], obey)
    await asyncio.get_running_loop().create_future()
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
