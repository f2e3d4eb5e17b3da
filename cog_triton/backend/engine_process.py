"""Engine process: runs a `StepEngine` in a child process and serves it as a `TokenEngine`.

OpenVINO holds the GIL for a whole step. In Triton's stub that would keep requests from arriving
and tokens from leaving; in a child both go on while the next step is computed. One message crosses
for each step, whatever the batch.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

from cog_triton.backend import triton_log
from cog_triton.backend.engine_client import EngineClient
from cog_triton.backend.engine_loop import run_engine
from cog_triton.errors import CogTritonError
from cog_triton.system import gc_tuning, isolated_python, local_socket

_CLOSE_TIMEOUT_S = 10


class EngineProcess(EngineClient):
    """Parent's side of an engine process; the child exits when this process does."""

    def __init__(
        self,
        engine: str,
        parameters: Mapping[str, str],
        owner: int | None = None,
    ) -> None:
        """`engine` is ``module:class``, opened by ``from_parameters(parameters)``.

        It is a `StepEngine`, or has a `serve` of its own; see `main`. `parameters` may name
        another Python for it, ``engine_python``, which then gets this package and nothing else
        of ours. `owner` is the process that serves the engine; it is stopped when the child or
        this process dies, so that its supervisor notices. Raises the child's coded error when
        the engine cannot be opened, or RuntimeError when there is none; its traceback is on
        stderr. With the parameter ``coalesce`` "false" each event is emitted by itself.
        """
        self._stack = ExitStack()
        python, environment = parameters.get("engine_python"), None
        if python:
            links = self._stack.enter_context(TemporaryDirectory(prefix="cog-triton-"))
            environment = isolated_python.environment(Path(links))
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    python or sys.executable,
                    "-m",
                    __name__,
                    engine,
                    json.dumps(dict(parameters)),
                    str(theirs.fileno()),
                    str(owner or 0),
                ],
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        connection = Connection(ours.detach())
        try:
            opened = connection.recv()
        except (EOFError, OSError) as error:
            code = self._process.wait()
            self._stack.close()
            raise RuntimeError(
                f"the engine did not load: its process exited with {code}"
            ) from error
        if isinstance(opened, CogTritonError):
            self._process.wait()
            self._stack.close()
            raise opened
        super().__init__(
            connection,
            int(opened),
            partial(_signal, owner, signal.SIGTERM),
            coalesce=parameters.get("coalesce") != "false",
        )

    @classmethod
    def opener(cls, engine: str) -> Callable[[Mapping[str, str]], EngineProcess]:
        """An `open_engine` for `make_token_model`; tritonserver is the engine's owner."""

        def open_engine(parameters: Mapping[str, str]) -> EngineProcess:
            socket_name = local_socket.siblings_name(parameters["socket"])
            return cls(engine, {**parameters, "socket": socket_name}, owner=os.getppid())

        return open_engine

    def close(self) -> None:
        """See `TokenEngine.close`; a child that does not exit in time is killed."""
        super().close()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stack.close()


def _signal(owner: int | None, number: signal.Signals) -> None:
    if owner:
        with suppress(ProcessLookupError):
            os.kill(owner, number)


def main() -> None:
    """Child's entry point: open the engine and run it until the parent closes it or dies.

    An engine that is no `StepEngine` has ``serve(connection)`` in place of `run_engine`.
    """
    name, parameters, descriptor, owner = sys.argv[1:]
    triton_log.install()
    connection = Connection(int(descriptor))
    os.set_inheritable(int(descriptor), False)
    module, _, attribute = name.partition(":")
    engine = getattr(importlib.import_module(module), attribute)
    options = json.loads(parameters)
    try:
        opened = engine.from_parameters(options)
    except CogTritonError as error:
        connection.send(error)
        raise
    gc_tuning.tune_for_serving()
    try:
        if hasattr(opened, "serve"):
            opened.serve(connection)
        else:
            run_engine(opened, connection, options.get("socket"))
    except (EOFError, ConnectionError):
        # The owner's requests would wait forever, and Triton does not notice.
        _signal(int(owner), signal.SIGKILL)


if __name__ == "__main__":
    main()
