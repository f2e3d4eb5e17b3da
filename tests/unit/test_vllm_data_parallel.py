"""Two engines behind one vLLM host: vLLM's data parallelism, over the double."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripted_server import PATIENCE_S
from vllm_engines import vllm_engine
from vllm_hosts import (
    ABC,
    HANDLES,
    Inbox,
    Running,
    over_double,
    text,
    token_ids,
    tokens,
)

from cog_triton.engines.vllm.engine_outputs import TextOutputConverter, TokenOutputConverter
from cog_triton.engines.vllm.model_directory import read_model


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Running]:
    """A host of two engines with room for three requests each."""
    values = {"max_model_len": 10_000, "max_num_seqs": 3, "data_parallel_size": 2}
    with over_double(tmp_path, delay="0.05", **values) as started:
        yield started


def test_the_batch_size_is_that_of_all_engines(host: Running, tmp_path: Path) -> None:
    assert host.engine.stats().max_batch_size == 6
    model = read_model(vllm_engine(tmp_path / "again", max_num_seqs=3, data_parallel_size=2))
    assert model.max_num_seqs == 6


def test_outputs_of_both_engines_reach_their_requests(host: Running) -> None:
    inboxes = [Inbox() for _ in range(6)]
    for number, inbox in enumerate(inboxes):
        host.engine.submit(next(HANDLES), tokens([97 + number], 9), inbox)
    found = [token_ids(inbox.until_end()) for inbox in inboxes]
    assert found == [[97 + number] * 9 for number in range(6)]


def test_the_use_of_the_cache_is_the_mean_of_both_engines(host: Running) -> None:
    inboxes = {next(HANDLES): Inbox() for _ in range(4)}
    for handle, inbox in inboxes.items():
        host.engine.submit(handle, tokens(ABC, 9000), inbox)
    usage = 0.0
    deadline = time.monotonic() + PATIENCE_S
    while not usage and time.monotonic() < deadline:
        found = host.engine.stats().kv_cache
        usage = found.usage if found is not None else 0.0
    assert 0 < usage < 0.5
    for handle in inboxes:
        host.engine.cancel(handle)


def test_what_the_other_engine_aborts_is_an_error() -> None:
    completion = SimpleNamespace(index=0, token_ids=[], finish_reason="abort", logprobs=None)
    output = SimpleNamespace(outputs=[completion], finished=True, prompt_token_ids=[97])
    for converter in (TokenOutputConverter(tokens(ABC)), TextOutputConverter(text("abc"))):
        event = converter.convert(output)
        assert event is not None
        assert event.error is not None
        assert event.error.code == "E2105"
