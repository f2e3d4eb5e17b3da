"""Parsers of vLLM in a child process, in its double: what they give, and what they cannot harm."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from chat_templates import CHATML_TOOLS
from openai_server import TOKENIZER, USER, api, tokens, wait
from scripted_server import PATIENCE_S
from vllm_engines import double_environment

from cog_triton.engines.base import Abilities
from cog_triton.errors import ParserFailed, TritonStartFailed
from cog_triton.serving.openai.parsers.borrowed import BorrowedParsers, BorrowedStream
from cog_triton.serving.openai.parsers.call_parser import Answer, Call, Delta, join

TOOLS_TOKENIZER = replace(TOKENIZER, chat_template=CHATML_TOOLS)
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {}}}
SPEC = {"tools": [WEATHER], "tool_choice": "auto"}
SAID = '{so}Rome: [weather:{"city": "Rome"}] and [weather:{}] ü日!'
PARSED = Answer(
    "Rome:  and  ü日!", "so", [Call("weather", '{"city": "Rome"}'), Call("weather", "{}")]
)
TAGS = Abilities(guides={"json_schema"}, native_tags=True)


@contextmanager
def child(directory: Path, *names: str, **limits: Any) -> Iterator[BorrowedParsers]:
    TOKENIZER.tokenizer.save(str(directory / "tokenizer.json"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in double_environment().items():
            patch.setenv(name, value)
        tool, reasoning = names or ("brackets", "braces")
        made = BorrowedParsers(
            Path(sys.executable), directory / "links", directory, (tool, reasoning), **limits
        )
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def parsers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BorrowedParsers]:
    with child(tmp_path_factory.mktemp("vllm")) as made:
        yield made


class Reader:
    """A stream with what came back of it."""

    def __init__(self, parsers: BorrowedParsers, **spec: Any) -> None:
        self.stream = BorrowedStream(parsers, {**SPEC, **spec})
        self._news = threading.Semaphore(0)
        self.stream.begin([1, 2], self._news.release)
        self.deltas: list[Delta] = []

    def send(self, text: str, *, finished: bool = False) -> None:
        self.stream.send(text, TOKENIZER.encode(text), finished=finished)

    def read(self) -> Answer:
        while self.stream.waits:
            assert self._news.acquire(timeout=PATIENCE_S)
        self.deltas += self.stream.feed("")
        return join(self.deltas)

    def say(self, text: str) -> Answer:
        self.send(text, finished=True)
        return self.read()


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_deltas_are_those_of_vllms_parser(parsers: BorrowedParsers, size: int) -> None:
    reader = Reader(parsers)
    for start in range(0, len(SAID), size):
        reader.send(SAID[start : start + size], finished=start + size >= len(SAID))
    assert reader.read() == PARSED
    reader.stream.close()


def test_what_a_request_says_reaches_the_parser(parsers: BorrowedParsers) -> None:
    off = {"chat_template_kwargs": {"thinking": False}}
    assert Reader(parsers, **off).say("{so}") == Answer("{so}")
    assert Reader(parsers, tools=None, tool_choice=None).say("{a}[f:1]") == Answer("[f:1]", "a")
    prompted = BorrowedStream(parsers, SPEC)
    news = threading.Event()
    prompted.begin([9], news.set)
    prompted.send("{so}", [], finished=True)
    assert wait(lambda: not prompted.waits)
    assert join(prompted.finish()) == Answer("{so}")


MEMORY = 128 << 20
OWN = {
    "RAISE": "fails: IndexError: list index out of range",
    "ODD": "fails: UnicodeEncodeError",
    "HANG": "it takes more than 1 s of CPU time",
    "EAT": "it takes more than 128 MiB of memory",
}
OF_ALL = {"SLEEP": "it does not end", "KILL": f"ended with -{signal.SIGSEGV.value}"}


def test_a_parser_that_fails_ends_its_own_stream(tmp_path: Path) -> None:
    with child(tmp_path, cpu_seconds=1.0, memory_bytes=MEMORY) as parsers:
        others = [Reader(parsers) for _ in range(7)]
        pid = parsers._child.process.pid
        for misdeed, why in OWN.items():
            guilty = [Reader(parsers) for _ in range(2)]
            for place, reader in enumerate((guilty[0], *others, guilty[1])):
                reader.send(SAID[:20])
                reader.send(misdeed if reader in guilty else f"{SAID[20:-1]}{place}", finished=True)
            for place, reader in enumerate(others, 1):
                assert reader.read() == replace(PARSED, content=f"{PARSED.content[:-1]}{place}")
            for reader in guilty:
                assert wait(lambda reader=reader: not reader.stream.waits)
                with pytest.raises(ParserFailed, match=f"brackets and braces .*{why}"):
                    reader.stream.feed("")
            others = [Reader(parsers) for _ in range(7)]
        assert parsers._child.process.pid == pid


@pytest.mark.parametrize("misdeed", ["KILL", "killed"])
def test_a_child_that_ends_fails_its_streams_and_is_started_again(
    tmp_path: Path, misdeed: str
) -> None:
    with child(tmp_path, cpu_seconds=0.4, memory_bytes=MEMORY) as parsers:
        readers = [Reader(parsers) for _ in range(5)]
        for reader in readers:
            reader.send(SAID[:25])
            reader.read()
        if misdeed == "killed":
            parsers._child.process.kill()
            parsers._child.process.wait()
            assert Reader(parsers).say(SAID) == PARSED
        else:
            readers[0].send(misdeed)
        for reader in readers:
            assert wait(lambda reader=reader: reader.stream.failure)
            with pytest.raises(ParserFailed, match=OF_ALL.get(misdeed, "ended with -9")):
                reader.stream.feed("")
        assert Reader(parsers).say(SAID) == PARSED


def test_a_python_without_vllm_is_told(tmp_path: Path) -> None:
    with pytest.raises(TritonStartFailed, match="No module named 'vllm'"):
        BorrowedParsers(Path(sys.executable), tmp_path / "links", tmp_path, ("brackets", ""))


def create(served: Any, **options: Any) -> Any:
    options = {"tools": [WEATHER], "messages": USER, **options}
    return served.client().chat.completions.create(model="small", **options)


@contextmanager
def borrowing(
    parsers: BorrowedParsers, *texts: str, abilities: Abilities = TAGS, **options: Any
) -> Iterator[Any]:
    answer = tokens(*(texts or SAID))
    given = {"tokenizer": TOOLS_TOKENIZER, "abilities": abilities, "borrowed": parsers}
    with api(answer, **{**given, **options}) as served:
        yield served


def test_chats_are_parsed_whole_and_streamed(parsers: BorrowedParsers) -> None:
    with borrowing(parsers) as served:
        (choice,) = create(served).choices
        chunks = [each for each in create(served, stream=True) if each.choices]
        told = served.client().models.retrieve("small").model_dump()["capabilities"]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", PARSED.content)
    assert choice.message.reasoning_content == "so"
    made = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert made == [(call.name, call.arguments) for call in PARSED.calls]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == PARSED.content
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"
    assert len([delta for delta in deltas if delta.tool_calls]) > 2
    assert told["tool_choice"] == ["none", "auto", "required", "function"]
    assert told["strict_with_auto"]
    assert (told["tool_call_parser"], told["reasoning_parser"]) == ("vllm:brackets", "vllm:braces")


def test_forced_and_strict_calls_are_guided_by_vllms_tags(parsers: BorrowedParsers) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    with borrowing(parsers, '[weather:{"a": 1}]') as served:
        required = create(served, tool_choice="required").choices[0]
        one = create(served, tool_choice=named).choices[0]
        create(served, tools=[strict])
        create(served)
        sent = [request.values for request in served.triton.requests]
    assert (required.finish_reason, one.finish_reason) == ("tool_calls", "stop")
    assert one.message.tool_calls[0].function.arguments == '{"a": 1}'
    kinds = [request.get("guided_decoding_guide_type") for request in sent]
    assert kinds == ["vllm_structural_tag"] * 3 + [None]
    choices = [json.loads(request["guided_decoding_guide"])["format"] for request in sent[:3]]
    assert choices == [{"choice": "required"}, {"choice": named}, {"choice": "auto"}]


def test_what_has_no_tag_is_guided_as_json_or_refused(
    tmp_path: Path, parsers: BorrowedParsers, caplog: pytest.LogCaptureFixture
) -> None:
    guided = Abilities(guides={"json_schema"})
    text = '[{"name": "weather", "arguments": {}}]'
    for name in ("as_json", "mistral"):  # as vLLM has it, and a format that is ours, too
        with child(tmp_path, name, "") as made, borrowing(made, text) as served:
            calls = create(served, tool_choice="required").choices[0].message.tool_calls
            assert served.triton.requests[-1].values["guided_decoding_guide_type"] == "json_schema"
        assert [call.function.name for call in calls] == ["weather"]
    with (
        child(tmp_path, "unguided", "") as made,
        borrowing(made) as served,
        pytest.raises(openai.BadRequestError, match="vllm:unguided has no grammar"),
    ):
        create(served, tool_choice="required")
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    with borrowing(parsers, abilities=guided) as served:
        told = served.client().models.retrieve("small").model_dump()["capabilities"]
        assert told["tool_choice"] == ["none", "auto"]
        with pytest.raises(openai.BadRequestError, match="vllm:brackets has no grammar"):
            create(served, tool_choice="required")
        with caplog.at_level(logging.INFO):
            create(served, tools=[strict])
        assert "guided_decoding_guide" not in served.triton.requests[-1].values
    refused = {"type": "function", "function": {"name": "REFUSED"}}
    with (
        borrowing(parsers) as served,
        pytest.raises(openai.BadRequestError, match="REFUSED is no name of a function"),
    ):
        create(served, tools=[refused])
