"""Step guests of the vLLM host: one message an engine step, with and without vLLM's hook."""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from raw_clients import RawClient
from vllm_engines import DOUBLES, EOS
from vllm_hosts import ABC, Running, over_double, tokens

from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import (
    CACHED,
    CANCELLED,
    GOES_ON,
    LENGTH,
    PROMPT,
    STOP,
    StepItem,
)
from cog_triton.engines.vllm.engine_api import StepOutputs
from cog_triton.errors import VLLMUnknownError

STREAMS = 16


class StepGuest(RawClient):
    """A step guest without a stub: what it is sent, step by step."""

    def __init__(self, host: Running) -> None:
        super().__init__(host.socket)
        host.clients.append(self.greeted())

    def until_end(self, handles: Sequence[int]) -> list[list[StepItem]]:
        """The steps until every one of `handles` has ended."""
        left, steps = set(handles), []
        while left:
            steps.append(self.items())
            left -= {item.handle for item in steps[-1] if item.end != GOES_ON}
        return steps

    def ask(self, request: EngineRequest, handle: int = 1) -> tuple[list[int], StepItem]:
        """The ids and the last item of one request; its offsets have no gap."""
        self.submit(handle, request)
        items = [item for step in self.until_end([handle]) for item in step]
        ids: list[int] = []
        for item in items:
            assert (item.handle, item.sequence, item.offset) == (handle, 0, len(ids))
            ids += item.ids
        return ids, items[-1]


@pytest.fixture(scope="module", params=["", "other"], ids=["hook", "other"])
def interface(request: pytest.FixtureRequest) -> str:
    """vLLM's interface: with the hook, or another one."""
    return str(request.param)


@pytest.fixture(scope="module")
def host(interface: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    values = {"VLLM_DOUBLE_INTERFACE": interface, "VLLM_DOUBLE_DELAY": "0.01"}
    values["VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"] = "3"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        directory = tmp_path_factory.mktemp("steps")
        with over_double(directory, max_num_seqs=STREAMS, max_model_len=4096) as started:
            yield started


def test_an_engine_step_is_one_message(host: Running, interface: str) -> None:
    handles = range(1, STREAMS + 1)
    guest = StepGuest(host)
    assert guest.slots == STREAMS
    for handle in handles:
        guest.submit(handle, tokens(ABC, 60 + handle))
    steps = guest.until_end(handles)
    got: dict[int, list[int]] = defaultdict(list)
    for step in steps:
        for item in step:
            assert item.offset == len(got[item.handle])
            got[item.handle] += item.ids
    assert got == {handle: (ABC * 26)[: 60 + handle] for handle in handles}
    first = next(place for place, step in enumerate(steps) if step[-1].handle == STREAMS)
    last = next(place for place, step in enumerate(steps) if any(item.end for item in step))
    assert last - first > 20
    if not interface:
        for step in steps[first:last]:
            assert [item.handle for item in step] == list(handles)
            assert {len(item.ids) for item in step} == {1}


@pytest.mark.parametrize("streaming", [True, False])
def test_ends_of_requests(host: Running, streaming: bool) -> None:
    guest = StepGuest(host)

    def ask(ids: list[int], count: int, **values: Any) -> tuple[list[int], int]:
        got, last = guest.ask(tokens(ids, count, streaming=streaming, **values))
        return got, last.end

    assert ask(ABC, 5) == (list(b"abcab"), LENGTH)
    assert ask([97, EOS, 98], 50) == ([97], STOP)
    assert ask([97, EOS, 98], 50, min_tokens=2) == ([97, EOS, 98, 97], STOP)
    assert ask(ABC, 50, end_id=98) == ([97], STOP)
    assert ask(ABC, 5, end_id=-1, stop_words=((99, 97),)) == (list(b"ab"), STOP)
    assert ask(ABC, 5, bad_words=((98, 99),)) == (list(b"abdab"), LENGTH)


def test_cached_tokens_of_a_prompt_are_reported(host: Running) -> None:
    guest = StepGuest(host)
    for cached in ([], [31]):
        guest.submit(1, tokens(list(b"the same 16 bytes, and some more"), 4))
        items = [item for step in guest.until_end([1]) for item in step]
        assert [item.offset for item in items if item.sequence == CACHED] == cached


def test_likeliest_tokens_and_those_of_the_prompt(host: Running) -> None:
    """On the double; the real vLLM has the same shapes of `logprobs` and `prompt_logprobs`."""
    guest = StepGuest(host)
    request = tokens(ABC, 2, return_log_probs=True, top_log_probs=2, prompt_log_probs=True)
    guest.submit(1, request)
    prompt, *output = [item for step in guest.until_end([1]) for item in step]
    assert (prompt.sequence, prompt.offset, prompt.ids, prompt.width) == (PROMPT, 0, ABC, 3)
    assert prompt.log_probs[3:6] == [-9.0, -1.0, -2.0]
    assert list(prompt.alternatives[2:4]) == [ABC[1] + 1, ABC[1] + 2]
    for place, item in enumerate(item for item in output if item.ids):
        (token,) = item.ids
        assert (item.offset, list(item.alternatives)) == (place, [token, token + 1])
        assert item.log_probs[0] == item.log_probs[1] == item.log_probs[2] + 1


def test_a_cancelled_request_ends_once_and_is_aborted(host: Running) -> None:
    guest = StepGuest(host)
    before = len(host.calls("add_request"))
    guest.submit(1, tokens(ABC, 4000))
    guest.submit(2, tokens(ABC, 60))
    guest.items()
    guest.cancel(1)
    guest.cancel(1)
    guest.submit(3, tokens(ABC, 4000))
    guest.cancel(3)  # which vLLM may not know yet
    items = [item for step in guest.until_end([1, 2, 3]) for item in step]
    ends = [(item.handle, item.end) for item in items if item.end != GOES_ON]
    assert sorted(ends) == [(1, CANCELLED), (2, LENGTH), (3, CANCELLED)]
    for handle, _ in ends:
        assert [item.end for item in items if item.handle == handle][-1] != GOES_ON
    names = {call["id"] for call in host.calls("add_request")[before:]}
    aborted = {name for call in host.calls("abort") for name in call["ids"]}
    assert len(aborted & names) in (1, 2)  # the third may never have reached vLLM


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The double's classes, in this process."""
    monkeypatch.delenv("VLLM_DOUBLE_INTERFACE", raising=False)
    monkeypatch.syspath_prepend(str(DOUBLES))
    of_engine = importlib.import_module("vllm.v1.engine.async_llm")
    of_outputs = importlib.import_module("vllm.v1.engine.output_processor")
    yield SimpleNamespace(
        AsyncLLM=of_engine.AsyncLLM,
        OutputProcessor=of_outputs.OutputProcessor,
        RequestOutputCollector=of_outputs.RequestOutputCollector,
    )
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


def engine_of(double: SimpleNamespace) -> Any:
    engine = double.AsyncLLM.__new__(double.AsyncLLM)
    engine.output_processor = double.OutputProcessor(None, log_stats=False)
    return engine


def test_the_end_of_a_step_is_told_before_its_statistics(double: SimpleNamespace) -> None:
    ends: list[str] = []
    engine = engine_of(double)
    engine.output_processor.update_scheduler_stats = lambda stats: ends.append(stats)

    def fail() -> None:
        ends.append("step")
        raise RuntimeError("as if a peer were gone")

    StepOutputs(engine, fail)
    engine.output_processor.update_scheduler_stats("stats")
    assert ends == ["step", "stats"]


@pytest.mark.parametrize(
    ("owner", "name", "other", "words"),
    [
        ("AsyncLLM", "add_request", lambda self, request: None, r"takes \['request'\]"),
        ("AsyncLLM", "_run_output_handler", lambda self: None, "does not call process_outputs"),
        ("OutputProcessor", "process_outputs", lambda self, outputs: None, "does not call put"),
        ("OutputProcessor", "update_scheduler_stats", lambda self: None, r"takes \['self'\]"),
        ("OutputProcessor", "propagate_error", None, "AttributeError"),
        ("RequestOutputCollector", "put", lambda self, a, b: None, "takes"),
        ("RequestOutputCollector", "get_nowait", None, "AttributeError|TypeError"),
    ],
)
def test_any_other_interface_is_found_at_start(
    owner: str, name: str, other: Any, words: str, double: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    StepOutputs(engine_of(double), lambda: None)
    monkeypatch.setattr(getattr(double, owner), name, other)
    with pytest.raises(VLLMUnknownError, match=f"by engine steps.*{words}"):
        StepOutputs(engine_of(double), lambda: None)
