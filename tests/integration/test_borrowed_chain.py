"""Parsers of vLLM in the whole chain: the double of vLLM repeats its prompt, and is parsed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from stack import processes_of, wait_until
from vllm_engines import calls
from vllm_stack import VLLMStack

pytestmark = pytest.mark.integration

SAID = '{so}Rome: [weather:{"city": "Rome"}] - ü!'
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
TEMPLATE = "{{ messages[0].content }}{% if tools %}{% endif %}"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMStack]:
    directory = tmp_path_factory.mktemp("vllm")
    (directory / "template").write_text(TEMPLATE)
    stack = VLLMStack(
        directory,
        loras=False,
        TOOL_CALL_PARSER="vllm:brackets",
        REASONING_PARSER="vllm:braces",
        CHAT_TEMPLATE=str(directory / "template"),
        VLLM_DOUBLE_DELAY="0.02",
    )
    with stack.served():
        yield stack


def chat(served: VLLMStack, text: str = SAID, **options: Any) -> Any:
    client = openai.OpenAI(base_url=f"{served.own}/v1", api_key="none", max_retries=0)
    with client:
        (model,) = client.models.list().data
        made = client.chat.completions.create(
            **{
                "model": model.id,
                "messages": [{"role": "user", "content": text}],
                "tools": TOOLS,
                "max_tokens": len(text.encode()),
                "temperature": 0,
                **options,
            }
        )
        return list(made) if options.get("stream") else made


def child_of(served: VLLMStack) -> int:
    """The one process that parses."""
    found = processes_of(served.work_dir).items()
    (pid,) = (pid for pid, line in found if "vllm.parser_child" in line)
    return pid


def told(chunks: list[Any]) -> tuple[str, str, str]:
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    parts = [call.function.arguments for delta in deltas for call in delta.tool_calls or []]
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    return reasoning, "".join(delta.content or "" for delta in deltas), "".join(parts)


EXPECTED = ("so", "Rome:  - ü!", '{"city": "Rome"}')


def test_answers_are_parsed_in_vllms_python(served: VLLMStack) -> None:
    assert told(chat(served, stream=True)) == EXPECTED
    message = chat(served).choices[0].message
    assert (message.reasoning_content, message.content) == EXPECTED[:2]
    assert [call.function.arguments for call in message.tool_calls] == [EXPECTED[2]]
    assert "answers are parsed by vLLM 0.33.0, as brackets and braces" in served.output


def test_the_engine_gets_the_reasoning_parser_and_the_tag(served: VLLMStack) -> None:
    (opened, *_) = calls(served.journal, "open")
    assert "braces" in json.dumps(opened)
    chat(served, tool_choice="required")
    added = calls(served.journal, "add_request")[-1]
    assert "structural_tag" in json.dumps(added)


def test_a_child_that_is_killed_fails_its_answers_and_the_next_has_another(
    served: VLLMStack,
) -> None:
    before = len(calls(served.journal, "add_request"))
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(chat, served, SAID * 8, stream=True) for _ in range(8)]
        assert wait_until(lambda: len(calls(served.journal, "add_request")) == before + 8)
        killed = child_of(served)
        os.kill(killed, signal.SIGKILL)
        for each in streams:
            with pytest.raises(openai.APIError, match=r"E2114 ParserFailed.*ended with -9"):
                each.result()
    assert told(chat(served, stream=True)) == EXPECTED
    assert child_of(served) != killed


def test_a_parser_that_fails_costs_one_answer(served: VLLMStack) -> None:
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(chat, served, stream=True) for _ in range(3)]
        with pytest.raises(openai.APIError, match="E2114 ParserFailed"):
            chat(served, "RAISE")
        with pytest.raises(openai.APIError, match="more than 2 s of CPU time"):
            chat(served, "HANG", stream=True)
        assert [told(each.result()) for each in others] == [EXPECTED] * 3
