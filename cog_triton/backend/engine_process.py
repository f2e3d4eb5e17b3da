"""Program of an engine process: opens an engine, and serves it to Triton's stubs over a socket.

The engine keeper starts it. OpenVINO holds the GIL for a whole step: in Triton's stub that would
keep requests from arriving and tokens from leaving; here both go on while the next step is
computed. One message crosses for each step, whatever the batch.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from contextlib import suppress

from cog_triton.backend import triton_log
from cog_triton.engines.step_loop import run_engine
from cog_triton.errors import CogTritonError
from cog_triton.ipc.connection import Connection
from cog_triton.keeper.keeper_messages import Attach, NotOpened, Opened
from cog_triton.system import local_socket, process_tuning
from cog_triton.system.shared_time import SharedTime


def main() -> None:
    """Open the engine and run it until the keeper closes it or dies.

    Arguments: the engine as ``module:class``, its parameters as JSON, the keeper's socket, the
    number that the keeper knows this process by, and the socket to listen on. An
    `AsyncEngine` has ``serve`` in place of `run_engine`.
    """
    name, parameters, keeper, number, address = sys.argv[1:]
    triton_log.install()
    control = Connection.to(keeper)
    control.send(Attach(int(number), os.getpid()))
    module, _, attribute = name.partition(":")
    engine = getattr(importlib.import_module(module), attribute)
    try:
        opened = engine.from_parameters(json.loads(parameters))
    except CogTritonError as error:
        control.send(NotOpened(error))
        raise
    process_tuning.tune_for_serving()
    # Not before: what the engine forks would listen, too.
    listener = local_socket.listen(address)
    with suppress(EOFError, ConnectionError):  # the keeper is gone
        if hasattr(opened, "serve"):
            control.send(Opened())
            opened.serve(control, listener)
        else:
            progress = SharedTime()
            control.send(Opened(progress.descriptor))
            run_engine(opened, control, listener, progress)


if __name__ == "__main__":
    main()
