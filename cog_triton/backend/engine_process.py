"""Program of an engine process: opens an engine, and serves it to Triton's stubs over a socket.

The server's parent starts it. OpenVINO holds the GIL for a whole step: in Triton's stub that would
keep requests from arriving and tokens from leaving; here both go on while the next step is
computed. One message crosses for each step, whatever the batch.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
from contextlib import suppress

from cog_triton.backend import triton_log
from cog_triton.engines.engine_loop import run_engine
from cog_triton.engines.engine_orders import NotOpened
from cog_triton.errors import CogTritonError
from cog_triton.ipc.framing import frame
from cog_triton.ipc.messages import encode
from cog_triton.system import process_tuning
from cog_triton.system.shared_time import SharedTime


def main() -> None:
    """Open the engine and run it until the parent closes it or dies.

    Arguments: the engine as ``module:class``, its parameters as JSON, and two descriptors: of the
    connection with the parent, and of the `SharedTime` when its next step is due.
    """
    name, parameters, *descriptors = sys.argv[1:]
    socket_number, progress = map(int, descriptors)
    for descriptor in (socket_number, progress):
        os.set_inheritable(descriptor, False)
    triton_log.install()
    control = socket.socket(fileno=socket_number)
    module, _, attribute = name.partition(":")
    engine = getattr(importlib.import_module(module), attribute)
    try:
        opened = engine.from_parameters(json.loads(parameters))
    except CogTritonError as error:
        control.sendall(frame(encode(NotOpened(error))))
        raise
    process_tuning.tune_for_serving()
    with suppress(EOFError, ConnectionError):  # the parent is gone
        run_engine(opened, control, SharedTime(progress))


if __name__ == "__main__":
    main()
