"""vLLM hosts over the double of vLLM, and requests for them."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_engines import calls, vllm_engine

from cog_triton.backend.engine_client import EngineClient
from cog_triton.backend.engine_process import EngineProcess
from cog_triton.engines.request import EngineRequest
from cog_triton.system.local_socket import connect
from cog_triton.text.sampling import SamplingParams

HOST = "cog_triton.engines.vllm.engine_host:VLLMHost"
PATIENCE_S = 20
ABC = list(b"abc")


class Running:
    """A host, its owner's connection and a guest's, and what the double was called with."""

    def __init__(self, directory: Path, **parameters: str) -> None:
        self.journal = directory.parent / "journal"
        self.death = directory.parent / "death"
        self.socket = f"test-{secrets.token_hex(8)}"
        self.engine = EngineProcess(
            HOST, {"engine_dir": str(directory), "socket": self.socket, **parameters}
        )
        self.pid = self.engine._process.pid

    def guest(self) -> EngineClient:
        connection = connect(self.socket)
        return EngineClient(connection, connection.recv(), lambda: None)

    def calls(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        """At least `count` calls of one name."""
        deadline = time.monotonic() + PATIENCE_S
        while len(found := calls(self.journal, name)) < count:
            assert time.monotonic() < deadline, f"{count} calls of {name} do not come"
            time.sleep(0.01)
        return found


@contextmanager
def running(
    tmp_path: Path, parameters: Mapping[str, str] | None = None, **arguments: Any
) -> Iterator[Running]:
    """`parameters` are the model's, `arguments` those of ``model.json``."""
    host = Running(vllm_engine(tmp_path / "engine", **arguments), **(parameters or {}))
    try:
        yield host
    finally:
        closer = threading.Thread(target=host.engine.close, daemon=True)
        closer.start()
        closer.join(PATIENCE_S)
        assert not closer.is_alive(), "close() hangs"
        assert not Path("/proc", str(host.pid)).exists()


def tokens(ids: list[int], max_tokens: int = 5, **values: Any) -> EngineRequest:
    own = ("temperature", "top_k", "top_p", "seed", "min_tokens", "presence_penalty")
    sampling = {name: values.pop(name) for name in own if name in values}
    sampling |= {"length_penalty": values.pop("length_penalty", 1.0)}
    return EngineRequest(
        input_ids=ids, sampling=SamplingParams(max_tokens=max_tokens, **sampling), **values
    )
