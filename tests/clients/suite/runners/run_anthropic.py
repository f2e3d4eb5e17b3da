"""anthropic: messages whole and streamed, tools, an agent loop, counted tokens, errors."""

from __future__ import annotations

import asyncio

import agent_tools
import anthropic
from anthropic.types import ToolParam, beta, message_count_tokens_params, message_create_params
from checks import check, main, raises, server

HERE, MOCK = server("openvino"), server("mock")
ASK = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris"
CLIENT, OF_MOCK = (
    anthropic.Anthropic(
        base_url=one.openai.removesuffix("/v1"), api_key="none", max_retries=0, timeout=120
    )
    for one in (HERE, MOCK)
)
GIVEN = {"model": HERE.model, "messages": ASK, "max_tokens": 32}
GREEDY = {"extra_body": {"temperature": 0}}
"""This client has no field for it any more."""
TOOLS = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"]["description"],
        "input_schema": tool["function"]["parameters"],
    }
    for tool in agent_tools.TOOLS
]


@check
def a_message() -> str:
    answer = CLIENT.messages.create(
        **GIVEN, **GREEDY, system="Be brief.", metadata={"user_id": "u"}
    )
    (block,) = answer.content
    assert block.type == "text"
    assert "Paris" in block.text
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.output_tokens > 2
    HERE.knows("messages", message_create_params.MessageCreateParamsBase)
    HERE.knows("messages", beta.message_create_params.MessageCreateParamsBase)
    HERE.knows("messages", message_count_tokens_params.MessageCountTokensParams)
    HERE.knows("tools of messages", ToolParam)
    return block.text


@check
def streamed_text_and_events() -> None:
    whole = CLIENT.messages.create(**GIVEN, **GREEDY)
    with CLIENT.messages.stream(**GIVEN, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text.startswith(PARIS)
    assert final.content[0].text == text == whole.content[0].text
    assert (final.usage.input_tokens, final.stop_reason) == (
        whole.usage.input_tokens,
        whole.stop_reason,
    )
    events = [event.type for event in CLIENT.messages.create(**GIVEN, **GREEDY, stream=True)]
    assert (events[0], events[-2:]) == ("message_start", ["message_delta", "message_stop"])


@check
def stop_sequences() -> None:
    answer = CLIENT.messages.create(**GIVEN, **GREEDY, stop_sequences=["zzz", " Paris"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " Paris")
    assert answer.content[0].text == PARIS.removesuffix(" Paris")


@check
def tokens_are_counted() -> None:
    found = CLIENT.messages.count_tokens(model=HERE.model, messages=ASK, tools=TOOLS)
    answer = CLIENT.messages.create(**{**GIVEN, "max_tokens": 1}, tools=TOOLS)
    assert found.input_tokens == answer.usage.input_tokens


@check
def tools_auto_any_named_and_none() -> None:
    def calls(**choice: object) -> list:
        answer = CLIENT.messages.create(
            **{**GIVEN, "max_tokens": 300}, **GREEDY, tools=TOOLS, tool_choice=choice
        )
        return [block for block in answer.content if block.type == "tool_use"]

    assert isinstance(calls(type="auto"), list)
    assert len(calls(type="any", disable_parallel_tool_use=True)) == 1
    (named,) = calls(type="tool", name="add")
    assert named.name == "add"
    assert named.input.keys() == {"a", "b"}
    assert calls(type="none") == []


@check
def tool_deltas_joined_are_the_whole_call() -> None:
    given = {**GIVEN, "max_tokens": 300, "tools": TOOLS, "tool_choice": {"type": "any"}, **GREEDY}
    whole = CLIENT.messages.create(**given)
    with CLIENT.messages.stream(**given) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert pieces
    assert [(block.name, block.input) for block in final.content] == [
        (block.name, block.input) for block in whole.content
    ]
    assert final.stop_reason == whole.stop_reason == "tool_use"


@check
def agent_loop_of_two_tools_and_three_turns() -> str:
    """Each turn must call a tool that was not used yet; the last one, none."""
    messages: list = [{"role": "user", "content": agent_tools.TASK}]
    used, told = set(), []
    for _ in range(3):
        left = [tool for tool in TOOLS if tool["name"] not in used]
        kind = {"type": "any", "disable_parallel_tool_use": True} if left else {"type": "none"}
        with CLIENT.messages.stream(
            model=HERE.model,
            messages=messages,
            tools=left or TOOLS,
            tool_choice=kind,
            max_tokens=300,
            **GREEDY,
        ) as stream:
            answer = stream.get_final_message()
        messages.append({"role": "assistant", "content": answer.content})
        results = []
        for block in answer.content:
            if block.type == "tool_use":
                result = agent_tools.call(block.name, block.input)
                used.add(block.name)
                told.append(f"{block.name}({block.input}) = {result}")
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": result})
        if results:
            messages.append({"role": "user", "content": results})
    assert used == {"temperature", "add"}
    assert answer.content[0].text
    return f"{told}: {answer.content[0].text}"


@check
def its_tool_runner() -> None:
    """The loop of the client itself, which ends with a message without calls."""

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Sum of two numbers."""
        return agent_tools.add(a, b)

    runner = CLIENT.beta.messages.tool_runner(**GIVEN, tools=[add], max_iterations=3)
    assert runner.until_done().type == "message"


@check
def async_streams_at_once() -> None:
    async def one(client: anthropic.AsyncAnthropic) -> str:
        async with client.messages.stream(**GIVEN, **GREEDY) as stream:
            return "".join([text async for text in stream.text_stream])

    async def eight() -> list[str]:
        url = HERE.openai.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as client:
            return await asyncio.gather(*(one(client) for _ in range(8)))

    assert all(text.startswith(PARIS) for text in asyncio.run(eight()))


@check
def errors_are_typed() -> None:
    create = CLIENT.messages.create
    error = raises(anthropic.BadRequestError, lambda: create(**{**GIVEN, "max_tokens": 0}))
    assert error.body["error"]["type"] == "invalid_request_error"
    assert error.body["error"]["message"].startswith("E1005")
    raises(anthropic.NotFoundError, lambda: create(**{**GIVEN, "model": "absent"}))
    prefill = [*ASK, {"role": "assistant", "content": "The"}]
    raises(anthropic.BadRequestError, lambda: create(**{**GIVEN, "messages": prefill}))
    long = [{"role": "user", "content": "word " * 200_000}]
    error = raises(anthropic.BadRequestError, lambda: create(**{**GIVEN, "messages": long}))
    assert "prompt is too long" in str(error)


@check
def a_closed_stream_stops_the_generation() -> None:
    with MOCK.stops_a_generation(fewer_than=1000):
        given = {"model": MOCK.model, "messages": ASK, "max_tokens": 1000}
        with OF_MOCK.messages.stream(**given) as stream:
            next(iter(stream.text_stream))


if __name__ == "__main__":
    main()
