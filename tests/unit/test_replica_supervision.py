"""Supervision of several engines: each is checked by itself, and what does not go beside them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tensorrt_llm_engines
import vllm_engines

from cog_triton.engines.mock import mock_directory
from cog_triton.engines.mock.family import MockFamily
from cog_triton.engines.vllm.family import VLLMFamily
from cog_triton.errors import InvalidArgument, TritonUnknownError
from cog_triton.serving import engine_preparation
from cog_triton.serving.admission import Admission
from cog_triton.serving.failure_detection import FailureDetection
from cog_triton.settings import load_settings


class Streams:
    """Streams of engines, of which some fail or are silent."""

    def __init__(self, **engines: str) -> None:
        parts = enumerate(engines.values())
        self.serving = {n: SimpleNamespace(kind=kind, last_token_at=0.0) for n, kind in parts}
        self.asked: list[str] = []

    async def probe(self, transport: Any) -> None:
        self.asked.append(transport.kind)
        if transport.kind == "fails":
            raise TritonUnknownError("a CUDA error")
        if transport.kind == "dies":
            self.serving = {n: one for n, one in self.serving.items() if one is not transport}
            raise TritonUnknownError("it is gone")


def checked(streams: Streams, asks: int = 0) -> Any:
    """What the check of all engines finds; None if, after so many questions, nothing is wrong."""

    async def run() -> Any:
        unused: Any = None
        admission, several = Admission(1, resumes=True), cast(Any, streams)
        given = (unused, unused, several, streams.probe, admission, several)
        asked = FailureDetection(*given)
        asked.requested.set()
        watch = asyncio.ensure_future(asked._watch_engines())
        async with asyncio.timeout(60):
            while not watch.done() and not 0 < asks <= len(streams.asked):
                await asyncio.sleep(0.005)
        done, _ = await asyncio.wait({watch}, timeout=0.5)
        watch.cancel()
        return watch.result() if done else None

    return asyncio.run(run())


def test_an_engine_that_fails_is_found_among_those_that_are_well() -> None:
    streams = Streams(a="well", b="fails", c="well")
    found = checked(streams)
    assert (found.replica, "a CUDA error" in found.reason) == (1, True)
    assert streams.asked == ["well", "fails", "fails"]


def test_engines_that_are_well_are_left() -> None:
    streams = Streams(a="well", b="well")
    assert checked(streams, 2) is None
    assert streams.asked == ["well", "well"]


def test_an_engine_that_dies_of_its_check_is_not_killed_again() -> None:
    streams = Streams(a="dies", b="well")
    assert checked(streams, 2) is None


def test_engines_of_tensorrt_llm_are_refused(tmp_path: Path) -> None:
    family = tensorrt_llm_engines.family(tmp_path / "engine")
    refused = r"ENGINE_REPLICAS=2: must be 1 with a tensorrt_llm engine"
    with pytest.raises(InvalidArgument, match=refused):
        family.check_environment(load_settings(engine_replicas=2))
    family.check_environment(load_settings())
    assert engine_preparation._replicas(load_settings(), family).count == 1


def test_a_spare_beside_several_engines_is_refused(tmp_path: Path) -> None:
    family = MockFamily.open(mock_directory.make_engine(tmp_path))
    with pytest.raises(InvalidArgument, match="ENGINE_REPLICAS=2: must be 1 with "):
        engine_preparation._replicas(load_settings(engine_replicas=2, spare_engine=True), family)
    assert engine_preparation._replicas(load_settings(engine_replicas=2), family).count == 2


@pytest.mark.parametrize(
    ("arguments", "gpus"),
    [
        ({}, 1),
        ({"tensor_parallel_size": 2}, 2),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "data_parallel_size": 2}, 12),
    ],
)
def test_gpus_of_an_engine_of_vllm(arguments: dict[str, Any], gpus: int, tmp_path: Path) -> None:
    assert VLLMFamily.open(vllm_engines.vllm_engine(tmp_path, **arguments)).gpus == gpus
