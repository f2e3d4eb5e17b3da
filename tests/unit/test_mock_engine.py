"""Mock engine on a fake clock: tokens, outputs and ends of streams, its answers and options."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mock_requests import MODEL, expected_tokens, request
from tokenizers import Tokenizer

from cog_triton.engines.adapter_registry import AdapterRegistry, RegisteredAdapter
from cog_triton.engines.base import options_of
from cog_triton.engines.mock import mock_directory
from cog_triton.engines.mock.engine import MockEngine, plan_output
from cog_triton.engines.mock.family import MockFamily
from cog_triton.engines.mock.mock_request import INPUTS, MockOptions
from cog_triton.engines.registry import open_engine
from cog_triton.engines.request import TokenEvent
from cog_triton.errors import (
    EngineCorrupt,
    InvalidArgument,
    TritonUnknownError,
)
from cog_triton.text.guide import Guide
from cog_triton.text.tokenizer import EngineTokenizer
from cog_triton.triton.model_repository import max_batch_size, read_config, render_repository
from cog_triton.triton.serve_config import ServeConfig

FOREVER = 9000
HANDLES = itertools.count(1)


class World:
    """An engine, its clock, and what came of each stream: (time, event)."""

    def __init__(self, **options: Any) -> None:
        self.now = 1000.0
        self.engine = MockEngine(MODEL, MockOptions(**options), lambda: self.now)
        self.events: dict[int, list[tuple[float, TokenEvent]]] = defaultdict(list)
        self.steps: list[list[int]] = []

    def ask(self, *max_tokens: int, **values: Any) -> int:
        handle = next(HANDLES)
        self.engine.submit(handle, request(*max_tokens, **values))
        return handle

    def run(self, seconds: float = 1e6, steps: int = 100_000, late: float = 0.0) -> None:
        """Step when the engine says so, or `late`, until it waits for a request."""
        end = self.now + seconds
        for _ in range(steps):
            wait = self.engine.wait_s()
            if wait is None or self.now + wait > end:
                break
            self.now += wait + (late if wait else 0.0)
            events = self.engine.step()
            self.steps.append([handle for handle, _ in events])
            for handle, event in events:
                self.events[handle].append((self.now, event))

    def ids(self, handle: int) -> list[int]:
        return [token for _, event in self.events[handle] for token in event.token_ids]

    def times(self, handle: int) -> list[float]:
        """When each token came, after the start."""
        return [at - 1000 for at, event in self.events[handle] for _ in event.token_ids]

    def sizes(self, handle: int) -> list[int]:
        return [len(event.token_ids) for _, event in self.events[handle]]

    def last(self, handle: int) -> TokenEvent:
        return self.events[handle][-1][1]


@pytest.mark.parametrize(
    ("options", "values", "times"),
    [
        ({"tps": 100}, {}, [0.01, 0.02, 0.03]),
        ({"tps": 10}, {"tps": 100.0}, [0.01, 0.02, 0.03]),
        ({"tps": 100, "prefill_ms": 2}, {"prompt": 50}, [0.11, 0.12, 0.13]),
        ({"tps": 10, "tokens_per_response": 2}, {}, [0.2, 0.2, 0.3]),
        ({"tps": 0, "prefill_ms": 1}, {"prompt": 9}, [0.009] * 3),
        ({"step_ms": 10, "prefill_ms": 5}, {"prompt": 9}, [0.05, 0.06, 0.07]),
    ],
)
def test_tokens_come_when_they_are_due(
    options: dict[str, Any], values: dict[str, Any], times: list[float]
) -> None:
    world = World(**options)
    handle = world.ask(3, **values)
    world.run()
    assert world.times(handle) == pytest.approx(times)
    assert world.ids(handle) == expected_tokens(3)


def test_a_request_without_a_slot_waits_in_the_queue() -> None:
    for options in ({"tps": 10}, {"step_ms": 100}):
        world = World(max_batch_size=2, **options)
        asked = [world.ask(count) for count in (2, 3, 4, 5)]
        world.run()
        assert world.times(asked[0]) == pytest.approx([0.1, 0.2])
        assert world.times(asked[2]) == pytest.approx([0.3, 0.4, 0.5, 0.6], abs=0.002)
        assert world.times(asked[3])[0] == pytest.approx(0.4, abs=0.002)


@pytest.mark.parametrize("options", [{"tps": 10}, {"tps": 0}, {"step_ms": 100}])
def test_cancel_ends_only_its_own_stream_and_frees_its_slot(options: dict[str, Any]) -> None:
    world = World(max_batch_size=1, **options)
    running, waiting, queued = world.ask(FOREVER), world.ask(2), world.ask(2)
    world.run(steps=3)
    before = world.ids(running)
    for handle in (running, queued, running, 10**9):
        world.engine.cancel(handle)
    world.run()
    assert world.last(running) == world.last(queued) == TokenEvent([], [], "cancelled")
    assert world.ids(running) == before == expected_tokens(3)
    assert world.ids(waiting) == expected_tokens(2)
    assert len(world.events[queued]) == 1
    assert world.engine.wait_s() is None


@pytest.mark.parametrize("options", [{"tps": 100}, {"tps": 0}, {"step_ms": 10}])
def test_streams_keep_what_requests_ask_for(options: dict[str, Any], tmp_path: Path) -> None:
    world = World(**options)
    registry = AdapterRegistry(tmp_path / "registry.json")
    registry.write([RegisteredAdapter("sql", 1, tmp_path, 2, "sql")])
    world.engine._registry = registry
    probable = world.ask(2, return_log_probs=True, top_log_probs=2, prompt_log_probs=True)
    failed = world.ask(9, inject="error", inject_after=3)
    stopped = world.ask(9, stop_words=((12, 13),))
    resumed = world.ask(9, made=expected_tokens(5))
    adapted = world.ask(9, adapter="sql")
    world.run()
    prompt, first, second = (event for _, event in world.events[probable])
    assert (prompt.of_prompt, prompt.token_ids, prompt.log_probs[:3]) == (
        True,
        [2] * 3,
        [-1, -1, -2],
    )
    assert (first.log_probs, first.alternatives) == ([0, 0, -1], [10, 11])
    assert second.finish == "length"
    assert world.ids(failed) == expected_tokens(3)
    assert isinstance(world.last(failed).error, TritonUnknownError)
    assert (world.ids(stopped), world.last(stopped).finish) == (expected_tokens(2), "stop")
    assert world.ids(resumed) == expected_tokens(9)[5:]
    assert world.ids(adapted) == expected_tokens(11)[2:]
    with pytest.raises(InvalidArgument, match="lora_name='sqk': no such adapter; did you"):
        world.ask(adapter="sqk")


FULL = 10_000 - 3
WORDS = ((12, 13),)
CRASH = {"inject": "crash"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"max_tokens": 99}, (99, 99, "length")),
        # What may fill the context ends with the passage.
        ({"max_tokens": FULL}, (7, 7, "stop")),
        ({"max_tokens": FULL, "made": [1, 2]}, (5, 5, "stop")),
        ({"max_tokens": FULL, "min_tokens": 40}, (40, 40, "stop")),
        ({"max_tokens": FULL, "end_id": -1}, (FULL, FULL, "length")),
        # An end id ends the output after min_tokens, and is cut.
        ({"end_id": 13}, (4, 3, "stop")),
        ({"end_id": 13, "max_tokens": 4}, (4, 3, "stop")),
        ({"end_id": 13, "max_tokens": 3}, (3, 3, "length")),
        ({"end_id": 13, "min_tokens": 3}, (4, 3, "stop")),
        ({"end_id": 13, "min_tokens": 4}, (11, 10, "stop")),
        # So does a stop word, across the passage's end, too.
        ({"stop_words": WORDS}, (4, 2, "stop")),
        ({"stop_words": ((16, 10),)}, (8, 6, "stop")),
        ({"stop_words": ((13, 12),)}, (50, 50, "length")),
        ({"stop_words": WORDS, "min_tokens": 4}, (11, 9, "stop")),
        ({"stop_words": (*WORDS, (11, 12))}, (3, 1, "stop")),
        # A fault happens at the next token; those made before a resumption count.
        (CRASH, (1, 0, "crash")),
        ({**CRASH, "inject_after": 4}, (5, 4, "crash")),
        ({**CRASH, "inject_after": 4, "made": [1, 2]}, (3, 2, "crash")),
        ({**CRASH, "inject_after": 1, "made": [1, 2]}, (48, 48, "length")),
    ],
)
def test_output_is_planned(values: dict[str, Any], expected: tuple[int, int, str]) -> None:
    found = plan_output(MODEL, request(**{"max_tokens": 50, **values}))
    assert (found.steps, found.tokens, found.end) == expected


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mock_directory.make_engine(tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def tokenizer(engine: Path) -> EngineTokenizer:
    return EngineTokenizer.load(engine)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"output_ids": []}, None),
        ({"output_ids": [10**6]}, None),
        ({"max_seq_len": "many"}, None),
        ({}, ""),
        ({}, "[]"),
        ({}, "{}"),
    ],
)
def test_an_invalid_mock_json_is_refused(
    change: dict[str, Any], text: str | None, engine: Path, tmp_path: Path
) -> None:
    content = json.loads((engine / "mock.json").read_text())
    (tmp_path / "mock.json").write_text(json.dumps({**content, **change}) if text is None else text)
    with pytest.raises(EngineCorrupt, match=r"mock\.json: not a mock engine"):
        open_engine(tmp_path)


SCRIPT = [
    {"after": "weather", "say": "<tool_call>{}</tool_call>"},
    {"after": "weather\n15", "say": "It is 15 °C."},
    {"after": "Thanks", "say": "You are welcome"},
]


def scripted(directory: Path, script: object = SCRIPT) -> Path:
    path = directory / "answers.json"
    path.write_text(script if isinstance(script, str) else json.dumps(script))
    return mock_directory.make_engine(directory / "engines", path)


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("How is the weather?", SCRIPT[0]["say"]),
        ("How is the weather\n15", SCRIPT[1]["say"]),  # of two at one place, the longer
        ("weather\n15 ... Thanks, and of the weather tomorrow?", SCRIPT[0]["say"]),
        ("<|im_start|>user\nweather\n15 Thanks<|im_end|>", SCRIPT[2]["say"]),
    ],
)
def test_the_entry_that_comes_last_answers(tmp_path: Path, prompt: str, answer: str) -> None:
    engine = scripted(tmp_path)
    tokenizer = Tokenizer.from_file(str(engine / "tokenizer.json"))
    mock = MockEngine(mock_directory.read_model(engine), MockOptions(tps=0))

    def rest() -> list[int]:
        events: list[TokenEvent] = []
        while not (events and events[-1].finish):
            events += [event for _, event in mock.step()]
        assert events[-1].finish == "stop"
        return [token for event in events for token in event.token_ids]

    ids = tokenizer.encode(prompt).ids
    whole = replace(request(100, guide=Guide("regex", ".*")), input_ids=ids)
    mock.submit(1, whole)
    said = rest()
    assert tokenizer.decode(said) == answer
    # Taken up after an engine's death: the same answer, although the prompt has grown by it.
    mock.submit(2, replace(whole, made=said[:2]))
    assert rest() == said[2:]


@pytest.mark.parametrize(
    "script", ["nonsense", "{}", [{"after": "a"}], [{"after": "", "say": "b"}], [1]]
)
def test_other_scripts_are_refused(tmp_path: Path, script: object) -> None:
    with pytest.raises(InvalidArgument, match=r"MOCK_ANSWERS=.*answers.json.*must be a list"):
        scripted(tmp_path, script)


ALL = {
    "tps": 33.5,
    "jitter": 0.25,
    "prefill_ms": 0.1,
    "tokens_per_response": 4,
    "join": False,
    "max_batch_size": 8,
    "cancellation_check_period_ms": 50,
}


def test_rendered_repository_has_the_options_and_extra_inputs(engine: Path, tmp_path: Path) -> None:
    family = MockFamily.open(engine)
    repository = render_repository(family, ServeConfig({"tensorrt_llm": ALL}), tmp_path / "repo")
    assert max_batch_size(repository) == 8
    assert family.defaults == MockOptions.parse(ALL)
    config = read_config(repository / "tensorrt_llm" / "config.pbtxt")
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    assert parameters["engine_dir"] == str(engine)
    assert parameters["coalesce"] == str(family.defaults.join).lower()
    parameters = options_of(parameters)
    assert MockOptions.parse(parameters) == family.defaults
    assert config.model_transaction_policy.decoupled
    own = {item.name: item for item in config.input if item.name in INPUTS}
    assert list(own) == list(INPUTS)
    assert all(item.optional and list(item.dims) == [1] for item in own.values())
    compile((repository / "tensorrt_llm" / "1" / "model.py").read_text(), "model.py", "exec")
    text = read_config(repository / "preprocessing" / "config.pbtxt")
    assert text.parameters["tokenizer_dir"].string_value == str(engine)
