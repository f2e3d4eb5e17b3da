"""vLLM host from start to end: adapters that come and go, deaths, and starts that fail."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from lora_adapters import adapter
from vllm_engines import vllm_engine
from vllm_hosts import (
    ABC,
    HANDLES,
    PATIENCE_S,
    Inbox,
    Running,
    ask,
    failure,
    running,
    text,
    token_ids,
    tokens,
)

from cog_triton.engines.adapter_registry import REGISTRY, AdapterRegistry, RegisteredAdapter
from cog_triton.errors import (
    CogTritonError,
    EngineIncompatible,
    InvalidPredictorConfig,
    TritonUnavailable,
    UnexpectedEngineArg,
)

pytestmark = pytest.mark.usefixtures("vllm_environment")


def registered(directory: Path, *names: str, number: int = 1) -> list[RegisteredAdapter]:
    return [
        RegisteredAdapter(name, place, adapter(directory / f"{name}-{place}"), 4, name)
        for place, name in enumerate(names, number)
    ]


def test_adapters_come_and_go_while_the_host_runs(tmp_path: Path) -> None:
    registry = AdapterRegistry(tmp_path / "registry.json")
    registry.write(())
    with running(tmp_path, {REGISTRY: str(registry.path)}, enable_lora=True) as host:
        assert "is not supported" in failure(host.engine, tokens(ABC, adapter="doll")).detail
        registry.write(registered(tmp_path, "doll"))
        for _ in range(3):
            ask(host.engine, tokens(ABC, adapter="doll"))
        assert len(host.calls("add_lora")) == 1, "it is loaded once"
        bad = RegisteredAdapter("odd", 7, adapter(tmp_path / "odd", 13), 13, "odd#7")
        registry.write([bad])
        found = failure(host.engine, tokens(ABC, adapter="odd"))
        assert isinstance(found, EngineIncompatible)
        assert "vLLM does not load the adapter: " in found.detail
        assert "LoRA rank 13 is odd" in found.detail
        assert "is not supported" in failure(host.engine, tokens(ABC, adapter="doll")).detail
        ask(host.engine, tokens(ABC))


def test_an_adapter_that_vllm_refuses_ends_the_start(tmp_path: Path) -> None:
    registry = AdapterRegistry(tmp_path / "registry.json")
    registry.write([RegisteredAdapter("odd", 1, adapter(tmp_path / "odd", 13), 13, "odd")])
    with (
        pytest.raises(EngineIncompatible, match="LoRA rank 13 is odd"),
        running(tmp_path, {REGISTRY: str(registry.path)}, enable_lora=True),
    ):
        pass


def test_engine_death_fails_every_request_and_ends_the_host(tmp_path: Path) -> None:
    with running(tmp_path, max_model_len=4096) as host:
        guest = host.guest()
        inboxes = [Inbox() for _ in range(6)]
        for inbox in inboxes[:3]:
            host.engine.submit(next(HANDLES), tokens(ABC, 4000), inbox)
        for inbox in inboxes[3:]:
            guest.submit(next(HANDLES), text("abc", {"max_tokens": 4000}, stream=True), inbox)
        inboxes[-1].next()
        host.engine.submit(next(HANDLES), text("kill the engine"), Inbox())
        for inbox in inboxes:
            assert isinstance(inbox.until_end()[-1].error, TritonUnavailable)
        assert host.engine._process.wait(PATIENCE_S) != 0


def test_death_of_an_idle_engine_ends_the_host_and_its_owner_knows(tmp_path: Path) -> None:
    with running(tmp_path) as host:
        host.death.touch()
        assert host.engine._process.wait(PATIENCE_S) != 0
        assert isinstance(failure(host.engine, tokens(ABC)), TritonUnavailable)


def test_the_host_may_run_in_another_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees this package and the double; the interpreter is ours under another name."""
    directory = vllm_engine(tmp_path / "engine")
    host = Running(directory, engine_python=sys.executable)
    try:
        assert token_ids(ask(host.engine, tokens(ABC, 2))) == [97, 98]
    finally:
        host.engine.close()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"gpu_memory_utilization": 1.5}, InvalidPredictorConfig),
        ({"gpu_memory_utilisation": 0.5}, UnexpectedEngineArg),
    ],
)
def test_an_engine_that_does_not_load_raises_its_error(
    arguments: dict[str, Any],
    error: type[CogTritonError],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(error, match="gpu_memory_utili"):
        Running(vllm_engine(tmp_path / "engine", **arguments))
