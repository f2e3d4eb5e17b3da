"""Engine processes that a test starts in the keeper's place."""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from cog_triton.engines.engine_client import EngineClient
from cog_triton.engines.engine_connectors import Connector
from cog_triton.ipc.connection import Connection
from cog_triton.keeper.keeper_messages import Attach, NotOpened, Opened, Stop
from cog_triton.system import isolated_python, local_socket

PATIENCE_S = 60
_PROGRAM = "cog_triton.backend.engine_process"


class Directly(Connector):
    """Finds one engine, at a known address; `dead` is set when it has hung up."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.dead = threading.Event()

    def start(self) -> None:
        self.on_address(self._address)

    def lost(self) -> None:
        self.dead.set()

    def close(self) -> None:
        pass


class StartedEngine(EngineClient):
    """An engine process and its owner's connection; other peers connect to `socket`."""

    def __init__(self, engine: str, parameters: Mapping[str, str]) -> None:
        """Raises the engine's coded error, or RuntimeError when it does not load."""
        keeper = f"cog-triton-test-{secrets.token_hex(8)}"
        self.socket = f"{keeper}-1"
        python, environment = parameters.get("engine_python"), None
        self._links = Path(tempfile.gettempdir(), keeper)
        if python:
            environment = isolated_python.environment(self._links)
        listener = local_socket.listen(keeper)
        program = [python or sys.executable, "-m", _PROGRAM, engine, json.dumps(dict(parameters))]
        self._process = subprocess.Popen([*program, keeper, "1", self.socket], env=environment)
        with listener:
            self._control = self._accepted(listener)
        assert self._control.receive() == Attach(1, self._process.pid)
        try:
            opened = self._control.receive()
        except EOFError as error:
            self._control.close()
            raise RuntimeError(f"the engine did not load: {self._process.wait()}") from error
        if isinstance(opened, NotOpened):
            self._control.close()
            self._process.wait()
            raise opened.error
        assert opened == Opened()
        coalesce = parameters.get("coalesce") != "false"
        self.connector = Directly(self.socket)
        super().__init__([self.connector], "owner", coalesce=coalesce)
        self.start()

    def _accepted(self, listener: socket.socket) -> Connection:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self._process.poll() is None:
            if (accepted := local_socket.accept(listener)) is not None:
                return Connection(accepted)
            time.sleep(0.005)
        raise RuntimeError("the engine's process does not attach")

    def close(self) -> None:
        """End the owner's connection and the process."""
        super().close()
        if self._process.poll() is None:
            with suppress(OSError):
                self._control.send(Stop())
        self._control.close()
        self._process.wait(PATIENCE_S)
        shutil.rmtree(self._links, ignore_errors=True)
