"""Program of the front door: binds the public ports, then starts Cog behind them.

    python -m cog_triton.door [--cog-only] [--watched] [arguments of cog.server.http]
    python -m cog_triton.door --beside-triton HTTP_PORT METRICS_PORT

The second form serves a Triton that someone else has started, on these ports of 127.0.0.1.
"""

from __future__ import annotations

import argparse
import logging
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import uvloop

from cog_triton.door.client_connection import BACKLOG
from cog_triton.door.front_door import FrontDoor
from cog_triton.door.upstream import Upstream, start_chain
from cog_triton.errors import CogTritonError
from cog_triton.settings import load_settings
from cog_triton.system import log_format
from cog_triton.system.ports import bind
from cog_triton.system.process_tuning import raise_open_files, tune_for_serving

_TRITON = ("TRITON_HTTP_PORT", "TRITON_METRICS_PORT")


def main(arguments: Sequence[str]) -> int:
    """Serve; the exit code of what is behind the door, 1 with a coded line if it cannot start."""
    parser = argparse.ArgumentParser(prog="python -m cog_triton.door", allow_abbrev=False)
    parser.add_argument("--cog-only", action="store_true", help="as for builds: no Triton")
    parser.add_argument("--watched", action="store_true", help="whoever started this watches Cog")
    parser.add_argument("--beside-triton", type=int, nargs=2, metavar=("HTTP", "METRICS"))
    options, for_cog = parser.parse_known_args(arguments)
    log_format.configure_from_environment("json")
    try:
        settings = load_settings()
        log_format.requests.disabled = not settings.log_requests
        # Whoever reads the log slowly holds up no connection.
        log_format.lose_requests_rather_than_wait(*log_format.own())
        descriptors = raise_open_files()
        served = ("PORT",) if options.cog_only else tuple(settings.public_ports)
        names = _TRITON if options.beside_triton else served
        sockets = {name: bind(name, *settings.public_ports[name], BACKLOG) for name in names}
        start = partial(start_chain, settings, names, for_cog)
        watches = not options.beside_triton and not options.watched
        door = FrontDoor(settings, descriptors, watches=watches)
        if options.beside_triton:
            start = partial(Upstream, dict(zip(_TRITON, options.beside_triton, strict=True)))
        return uvloop.run(_serve(door, sockets, start))
    except CogTritonError as error:
        logging.getLogger(__name__).error("%s", error)
        return 1


async def _serve(
    door: FrontDoor, sockets: Mapping[str, socket.socket], start: Callable[[], Upstream]
) -> int:
    tune_for_serving()
    return await door.serve(sockets, start)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
