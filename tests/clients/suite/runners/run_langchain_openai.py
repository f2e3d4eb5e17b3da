"""langchain-openai: chats, streams, batches, agent loops, tools, structured output, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from cases import ASK, FUNCTIONS, PARIS, PROMPT, City, cases
from checks import Server, check, main, server
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

HERE = server("openvino")
TOOLS = {name: tool(function) for name, function in FUNCTIONS.items()}


def given(one: Server = HERE, **fields: object) -> dict[str, Any]:
    where = {"model": one.model, "base_url": one.openai, "api_key": "none"}
    return {**where, "temperature": 0, "max_retries": 0, "timeout": 120, **fields}


CHAT = ChatOpenAI(**given(max_tokens=300))
RESPONSES = ChatOpenAI(**given(max_tokens=300, use_responses_api=True, store=False))
COMPLETIONS = OpenAI(**given(max_tokens=4))


def joined(pieces: list[Any]) -> Any:
    return sum(pieces[1:], pieces[0])


def chat(prompt: str) -> tuple[str, int]:
    answer = CHAT.invoke([SystemMessage("You are helpful."), HumanMessage(prompt)])
    assert answer.response_metadata["finish_reason"] == "stop"
    return answer.content, answer.usage_metadata["output_tokens"]


def chat_streamed(prompt: str) -> Iterator[str]:
    pieces = list(CHAT.stream(prompt, stream_usage=True))
    assert joined(pieces).usage_metadata["output_tokens"] > 2
    return (piece.content for piece in pieces)


def completions(prompt: str) -> str:
    found = COMPLETIONS.generate([prompt, "The capital of Italy is"])
    assert [one[0].text[:5] for one in found.generations] == [" Pari", " Rome"]
    return "".join(COMPLETIONS.stream(prompt))


def forced_call(prompt: str) -> tuple[str, dict[str, Any]]:
    bound = CHAT.bind_tools([*TOOLS.values()], tool_choice="add")
    (call,) = joined(list(bound.stream(prompt))).tool_calls
    return call["name"], call["args"]


def forced_response(prompt: str) -> tuple[str, dict[str, Any]]:
    bound = RESPONSES.bind_tools([*TOOLS.values()], tool_choice="required")
    call = bound.invoke(prompt).tool_calls[0]
    return call["name"], call["args"]


def loop(task: str, streamed: bool) -> tuple[list[str], str, list[str]]:
    model = ChatOpenAI(**given(server("scripted"))).bind_tools([*TOOLS.values()], strict=True)
    messages: list[Any] = [HumanMessage(task)]
    called = []
    while True:
        pieces = list(model.stream(messages)) if streamed else [model.invoke(messages)]
        answer = joined(pieces)
        messages.append(answer)
        if not answer.tool_calls:
            return called, answer.content, [piece.content for piece in pieces]
        for call in answer.tool_calls:
            called.append(call["name"])
            messages.append(TOOLS[call["name"]].invoke(call))


def closed_stream(tokens: int) -> None:
    pieces = CHAT.stream(ASK, max_tokens=tokens, extra_body={"ignore_eos": True})
    next(pieces)
    pieces.close()


cases(
    chat=chat,
    chat_streamed=chat_streamed,
    completions=completions,
    forced_call=forced_call,
    agent_loop=loop,
    an_absent_model=lambda name: ChatOpenAI(**given(model=name)).invoke(ASK),
    a_prompt_beyond_the_context=CHAT.invoke,
    a_closed_stream_stops_the_generation=closed_stream,
)
cases(
    "responses",
    chat_streamed=lambda prompt: (piece.text for piece in RESPONSES.stream(prompt)),
    forced_call=forced_response,
)
for method in ("json_schema", "function_calling"):
    cases(
        method.replace("_", " "),
        structured_output=CHAT.with_structured_output(City, method=method).invoke,
    )


@check
def asyncio_events() -> None:
    async def ask() -> dict[str, Any]:
        return {event["event"]: event["data"] async for event in CHAT.astream_events(ASK)}

    events = asyncio.run(ask())
    assert "on_chat_model_stream" in events
    assert events["on_chat_model_end"]["output"].content.startswith(PARIS)


@check
def logprobs_and_n() -> None:
    model = ChatOpenAI(**given(temperature=1, n=2, logprobs=True, max_tokens=4, seed=3))
    found = model.generate([[HumanMessage(PROMPT)]]).generations[0]
    assert len(found) == 2
    assert len(found[0].message.response_metadata["logprobs"]["content"]) == 4


if __name__ == "__main__":
    main()
