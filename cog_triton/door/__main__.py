"""Program of images: binds the public ports, starts the server with them, and watches it.

Run as `python -m cog_triton.door [--cog-only] [arguments of cog.server.http]`.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack

from cog_triton.errors import CogTritonError
from cog_triton.processes.public_sockets import as_arguments, bound
from cog_triton.serving.cog_health import CogWatch, HealthClient
from cog_triton.settings import Settings, load_settings
from cog_triton.system import log_format, reaper
from cog_triton.system.process_tuning import raise_open_files

_STARTING = (None, "STARTING", "UNKNOWN", "SETUP_FAILED")
# Platforms have to wait 15 s longer than DRAIN_TIMEOUT.
_EXIT_S = 14.0
_log = logging.getLogger("cog_triton.door")


def main(arguments: Sequence[str]) -> int:
    """Serve; the exit code of the server, 0 after a stop, 1 with a coded line without one."""
    parser = argparse.ArgumentParser(prog="python -m cog_triton.door", allow_abbrev=False)
    parser.add_argument("--cog-only", action="store_true", help="as for builds: no Triton")
    opened = ExitStack()
    options, for_server = parser.parse_known_args(arguments)
    log_format.configure_from_environment("json")
    try:
        settings = load_settings()
        raise_open_files()
        ports = settings.public_ports
        if options.cog_only:
            ports, for_server = {"PORT": ports["PORT"]}, ["--cog-only", *for_server]
        sockets = opened.enter_context(bound(ports))
    except CogTritonError as error:
        _log.error("%s", error)
        return 1
    process = reaper.spawn(
        [sys.executable, "-m", "cog_triton.front.server", *as_arguments(sockets), *for_server],
        grace=settings.drain_timeout + _EXIT_S,
        pass_fds=[one.fileno() for one in sockets.values()],
    )
    stopping = threading.Event()

    def pass_on(number: int, _: object) -> None:
        process.signal(number)  # the reaper kills the server at the second stop
        if number != signal.SIGUSR1 and not stopping.is_set():
            stopping.set()
            killing = threading.Timer(settings.drain_timeout + _EXIT_S, process.kill)
            killing.daemon = True
            killing.start()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, pass_on)
    watching = threading.Thread(target=_watch, args=(settings, process, stopping))
    watching.start()
    code = process.wait()
    stopped = stopping.is_set()
    stopping.set()
    opened.close()  # which ends a probe
    watching.join()
    return 0 if stopped else code


def _watch(settings: Settings, process: reaper.Reaped, stopping: threading.Event) -> None:
    """Kill a server that is lost after Cog was set up once, or that hangs."""
    health = HealthClient(settings)
    while health.read().get("status") in _STARTING:
        if stopping.wait(settings.cog_probe_period):
            return
    watch = CogWatch(settings, process.process.pid, health)
    while not stopping.wait(settings.cog_probe_period):
        try:
            if line := watch.check():
                _log.warning("%s", line)
        except CogTritonError as error:
            _log.error("%s", error)
            process.kill()
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
