"""Engine processes that a test starts in the server's place."""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from raw_clients import Control

from cog_triton.engines.engine_client import EngineClient
from cog_triton.engines.engine_orders import NotOpened, Opened, Serve, Stop
from cog_triton.system import isolated_python
from cog_triton.system.shared_time import SharedTime

PATIENCE_S = 60
_PROGRAM = "cog_triton.backend.engine_process"


class StartedEngine(EngineClient):
    """An engine process and its owner's connection; other peers connect to `socket`."""

    def __init__(self, engine: str, parameters: Mapping[str, str]) -> None:
        """Raises the engine's coded error, or RuntimeError when it does not load."""
        self.socket = f"cog-triton-test-{secrets.token_hex(8)}"
        python, environment = parameters.get("engine_python"), None
        self._package_links = Path(tempfile.gettempdir(), self.socket)
        if python:
            environment = isolated_python.environment(self._package_links)
        ours, its = socket.socketpair()
        progress = SharedTime()
        descriptors = its.fileno(), progress.descriptor
        program = [python or sys.executable, "-m", _PROGRAM, engine, json.dumps(dict(parameters))]
        self._process = subprocess.Popen(
            [*program, *map(str, descriptors)], env=environment, pass_fds=descriptors
        )
        its.close()
        progress.close()
        self._control = Control(ours)
        try:
            opened = self._control.answer()
        except EOFError as error:
            self._control.close()
            raise RuntimeError(f"the engine did not load: {self._process.wait()}") from error
        if isinstance(opened, NotOpened):
            self._control.close()
            self._process.wait()
            raise opened.error
        assert opened == Opened()
        self._control.order(Serve(self.socket, 1))
        coalesce = parameters.get("coalesce") != "false"
        super().__init__([self.socket], "owner", coalesce=coalesce)
        self.start()
        self.wait_until_linked()

    def close(self) -> None:
        """End the owner's connection and the process."""
        super().close()
        if self._process.poll() is None:
            with suppress(OSError):
                self._control.order(Stop())
        self._control.close()
        self._process.wait(PATIENCE_S)
        shutil.rmtree(self._package_links, ignore_errors=True)
