"""anthropic: messages whole and streamed, tools, agent loops, counted tokens, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
from anthropic.types import ToolParam, beta, message_count_tokens_params, message_create_params
from cases import FUNCTIONS, MESSAGES, PARIS, TOOLS, add_numbers, cases
from checks import Server, check, main, raises, server

HERE, MOCK = server("openvino"), server("mock")
OWN_TOOLS = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"]["description"],
        "input_schema": tool["function"]["parameters"],
    }
    for tool in TOOLS
]


def client(one: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=one.origin, api_key="none", max_retries=0, timeout=120)


CLIENT = client(HERE)


def given(one: Server = HERE, **fields: object) -> dict[str, Any]:
    """This client has no field for the temperature any more."""
    greedy = {"extra_body": {"temperature": 0}}
    return {"model": one.model, "messages": MESSAGES, "max_tokens": 300, **greedy, **fields}


def create(**fields: object) -> Any:
    return CLIENT.messages.create(**given(**fields))


def chat(_: str) -> tuple[str, int]:
    answer = create(system="You are helpful.", metadata={"user_id": "u"})
    assert answer.stop_reason == "end_turn"
    return answer.content[0].text, answer.usage.output_tokens


def chat_streamed(_: str) -> Iterator[str]:
    whole = create()
    with CLIENT.messages.stream(**given()) as stream:
        yield from stream.text_stream
        final = stream.get_final_message()
    assert (final.content[0].text, final.usage.input_tokens, final.stop_reason) == (
        whole.content[0].text,
        whole.usage.input_tokens,
        whole.stop_reason,
    )
    events = [event.type for event in create(stream=True)]
    assert (events[0], events[-2:]) == ("message_start", ["message_delta", "message_stop"])


def calls(**choice: object) -> list[Any]:
    answer = create(tools=OWN_TOOLS, tool_choice=choice)
    return [block for block in answer.content if block.type == "tool_use"]


def forced_call(_: str) -> tuple[str, dict[str, Any]]:
    """Whole and streamed: both are equal."""
    choice = {"type": "any", "disable_parallel_tool_use": True}
    (call,) = calls(**choice)
    with CLIENT.messages.stream(**given(tools=OWN_TOOLS, tool_choice=choice)) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert pieces
    assert final.stop_reason == "tool_use"
    assert [(block.name, block.input) for block in final.content] == [(call.name, call.input)]
    return call.name, call.input


def loop(task: str, streamed: bool) -> tuple[list[str], str, list[str]]:
    one = server("scripted")
    messages: list[Any] = [{"role": "user", "content": task}]
    called, pieces = [], []
    while True:
        fields = given(one, messages=messages, tools=OWN_TOOLS)
        if streamed:
            with client(one).messages.stream(**fields) as stream:
                pieces = [*stream.text_stream]
                answer = stream.get_final_message()
        else:
            answer = client(one).messages.create(**fields)
        messages.append({"role": "assistant", "content": answer.content})
        results = []
        for block in answer.content:
            if block.type == "tool_use":
                called.append(block.name)
                said = FUNCTIONS[block.name](**block.input)
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": said})
        if not results:
            return called, answer.content[0].text, pieces
        messages.append({"role": "user", "content": results})


cases(
    chat=chat,
    chat_streamed=chat_streamed,
    forced_call=forced_call,
    agent_loop=loop,
    an_absent_model=lambda name: create(model=name),
)


@check
def the_server_knows_its_fields() -> None:
    HERE.knows("messages", message_create_params.MessageCreateParamsBase)
    HERE.knows("messages", beta.message_create_params.MessageCreateParamsBase)
    HERE.knows("messages", message_count_tokens_params.MessageCountTokensParams)
    HERE.knows("tools of messages", ToolParam)


@check
def stop_sequences() -> None:
    answer = create(stop_sequences=["zzz", " Paris"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " Paris")
    assert answer.content[0].text == PARIS.removesuffix(" Paris")


@check
def tokens_are_counted() -> None:
    found = CLIENT.messages.count_tokens(model=HERE.model, messages=MESSAGES, tools=OWN_TOOLS)
    assert found.input_tokens == create(max_tokens=1, tools=OWN_TOOLS).usage.input_tokens


@check
def named_tool_and_none() -> None:
    (named,) = calls(type="tool", name="add")
    assert named.name == "add"
    assert calls(type="none") == []


@check
def its_tool_runner() -> None:
    """The loop of the client itself, which ends with a message without calls."""
    runner = CLIENT.beta.messages.tool_runner(
        **given(tools=[anthropic.beta_tool(add_numbers)], max_tokens=32), max_iterations=3
    )
    assert runner.until_done().type == "message"


@check
def async_streams_at_once() -> None:
    async def one(own: anthropic.AsyncAnthropic) -> str:
        async with own.messages.stream(**given()) as stream:
            return "".join([text async for text in stream.text_stream])

    async def eight() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=HERE.origin, api_key="none") as own:
            return await asyncio.gather(*(one(own) for _ in range(8)))

    assert all(text.startswith(PARIS) for text in asyncio.run(eight()))


@check
def errors_are_typed() -> None:
    error = raises(anthropic.BadRequestError, lambda: create(max_tokens=0))
    assert error.body["error"]["type"] == "invalid_request_error"
    assert error.body["error"]["message"].startswith("E1005")
    raises(anthropic.NotFoundError, lambda: create(model="absent"))
    prefill = [*MESSAGES, {"role": "assistant", "content": "The"}]
    raises(anthropic.BadRequestError, lambda: create(messages=prefill))
    long = [{"role": "user", "content": "word " * 200_000}]
    error = raises(anthropic.BadRequestError, lambda: create(messages=long))
    assert "prompt is too long" in str(error)


@check
def a_closed_stream_stops_the_generation() -> None:
    """The mock's, which is slow enough."""
    with (
        MOCK.stops_a_generation(fewer_than=1000),
        client(MOCK).messages.stream(**given(MOCK, max_tokens=1000, extra_body={})) as stream,
    ):
        next(iter(stream.text_stream))


if __name__ == "__main__":
    main()
