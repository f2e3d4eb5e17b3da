"""vLLM hosts over the double of vLLM, and requests for them."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from raw_clients import RawClient
from started_engines import StartedEngine
from vllm_engines import calls, double_environment, vllm_engine

from cog_triton.engines.engine_client import EngineClient
from cog_triton.engines.request import EngineRequest, TokenEvent
from cog_triton.engines.vllm.host_messages import TextRequest
from cog_triton.engines.vllm.sampling_arguments import from_client
from cog_triton.errors import CogTritonError
from cog_triton.text.sampling import SamplingParams

HOST = "cog_triton.engines.vllm.engine_host:VLLMHost"
PATIENCE_S = 60
ABC = list(b"abc")
HANDLES = itertools.count(1)


class Running:
    """A host, its owner's connection and a guest's, and what the double was called with."""

    def __init__(self, directory: Path, **parameters: str) -> None:
        self.journal = directory.parent / "journal"
        self.death = directory.parent / "death"
        self.engine = StartedEngine(HOST, {"engine_dir": str(directory), **parameters})
        self.socket = self.engine.socket
        self.pid = self.engine._process.pid
        self.clients: list[RawClient] = []

    def guest(self) -> EngineClient:
        client = EngineClient([self.socket], "tokens")
        client.start()
        client.wait_until_linked()
        return client

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
        for client in host.clients:
            client.close()
        closer = threading.Thread(target=host.engine.close, daemon=True)
        closer.start()
        closer.join(PATIENCE_S)
        assert not closer.is_alive(), "close() hangs"
        assert not Path("/proc", str(host.pid)).exists()


@contextmanager
def over_double(directory: Path, *, delay: str = "", **arguments: Any) -> Iterator[Running]:
    """A host over the double, whose steps take `delay` seconds."""
    values = {"VLLM_DOUBLE_DELAY": delay} if delay else {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in double_environment(directory / "journal", **values).items():
            patch.setenv(name, value)
        with running(directory, **arguments) as started:
            yield started


def tokens(ids: list[int], max_tokens: int = 5, **values: Any) -> EngineRequest:
    own = ("temperature", "top_k", "top_p", "seed", "min_tokens", "presence_penalty")
    sampling = {name: values.pop(name) for name in own if name in values}
    sampling |= {"length_penalty": values.pop("length_penalty", 1.0)}
    return EngineRequest(
        input_ids=ids, sampling=SamplingParams(max_tokens=max_tokens, **sampling), **values
    )


class Inbox:
    """Events of one request, as they come."""

    def __init__(self) -> None:
        self._events: queue.Queue[Any] = queue.Queue()

    def __call__(self, event: Any) -> None:
        self._events.put(event)

    def next(self) -> Any:
        return self._events.get(timeout=PATIENCE_S)

    def is_empty(self) -> bool:
        return self._events.empty()

    def until_end(self) -> list[Any]:
        events = [self.next()]
        while events[-1].finish is None and events[-1].error is None:
            events.append(self.next())
        return events


def ask(link: EngineClient, request: Any) -> list[Any]:
    """All events of a request."""
    inbox = Inbox()
    link.submit(next(HANDLES), request, inbox)
    return inbox.until_end()


def text(prompt: str, parameters: dict[str, Any] | None = None, **values: Any) -> TextRequest:
    """A text request."""
    return TextRequest(prompt=prompt, sampling=from_client(parameters or {}), **values)


def token_ids(events: list[TokenEvent]) -> list[int]:
    """Token ids of a request that went well."""
    assert events[-1].error is None
    return [token for event in events for token in event.token_ids]


def failure(link: EngineClient, request: Any) -> CogTritonError:
    """The error of a request."""
    *_, event = ask(link, request)
    assert event.error is not None
    return event.error
