"""langchain-openai: chats, streams, batches, tools, structured output, an agent loop, errors."""

from __future__ import annotations

import asyncio
from typing import Literal

import agent_tools
import openai
import pydantic
from checks import check, main, raises, server
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

HERE = server("openvino")
GIVEN = {"model": HERE.model, "base_url": HERE.openai, "api_key": "none", "temperature": 0}
CHAT = ChatOpenAI(**GIVEN, max_tokens=64, max_retries=0, timeout=120)
ASK = "What is the capital of France?"
PARIS = "The capital of France is Paris"
TOOLS = [tool(agent_tools.temperature), tool(agent_tools.add)]


class City(pydantic.BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]
    large: bool


@check
def invoke() -> None:
    answer = CHAT.invoke([SystemMessage("You are helpful."), HumanMessage(ASK)])
    assert "Paris" in answer.content
    assert answer.usage_metadata["output_tokens"] > 2
    assert answer.response_metadata["finish_reason"] == "stop"


@check
def stream() -> None:
    pieces = list(CHAT.stream(ASK, stream_usage=True))
    whole = sum(pieces[1:], pieces[0])
    assert whole.content.startswith(PARIS)
    assert whole.usage_metadata["output_tokens"] > 2
    assert len(pieces) > 3


@check
def batch() -> None:
    answers = CHAT.batch([ASK, "What is the capital of Italy?"])
    assert [word in answer.content for word, answer in zip(("Paris", "Rome"), answers, strict=True)]


@check
def asyncio_stream_and_events() -> None:
    async def ask() -> tuple[str, set[str]]:
        text = "".join([piece.content async for piece in CHAT.astream(ASK)])
        return text, {event["event"] async for event in CHAT.astream_events(ASK, version="v2")}

    text, kinds = asyncio.run(ask())
    assert text.startswith(PARIS)
    assert "on_chat_model_stream" in kinds


@check
def completions_in_batches() -> None:
    model = OpenAI(**GIVEN, max_tokens=4)
    assert model.invoke("The capital of France is").startswith(" Paris")
    found = model.generate(["The capital of France is", "The capital of Italy is"])
    assert [one[0].text[:5] for one in found.generations] == [" Pari", " Rome"]
    assert "".join(model.stream("The capital of France is")).startswith(" Paris")


@check
def logprobs_and_n() -> None:
    model = ChatOpenAI(**GIVEN | {"temperature": 1}, n=2, logprobs=True, max_tokens=4, seed=3)
    found = model.generate([[HumanMessage(ASK)]]).generations[0]
    assert len(found) == 2
    assert len(found[0].message.response_metadata["logprobs"]["content"]) == 4


def structured(method: str) -> object:
    return CHAT.with_structured_output(City, method=method).invoke(ASK)


@check
def structured_output_by_json_schema() -> None:
    assert isinstance(structured("json_schema"), City)


@check
def structured_output_by_function_calling() -> None:
    assert isinstance(structured("function_calling"), City)


@check
def structured_output_by_json_mode() -> None:
    """Any JSON; the model need not know the schema."""
    raw = CHAT.with_structured_output(City, method="json_mode", include_raw=True).invoke(
        f"{ASK} Answer as JSON.", max_tokens=300
    )
    assert raw["raw"].content.lstrip()[:1] in ("{", "["), raw


@check
def tool_calls_streamed() -> None:
    bound = CHAT.bind_tools(TOOLS, tool_choice="add")
    pieces = list(bound.stream(ASK, max_tokens=300))
    (call,) = sum(pieces[1:], pieces[0]).tool_calls
    assert call["name"] == "add"
    assert call["args"].keys() == {"a", "b"}


@check
def tools_auto() -> None:
    answer = CHAT.bind_tools(TOOLS).invoke(ASK, max_tokens=60)
    assert answer.content or answer.tool_calls or answer.invalid_tool_calls


@check
def agent_loop_of_two_tools_and_three_turns() -> str:
    messages = [HumanMessage(agent_tools.TASK)]
    used = []
    for _ in range(3):
        choice = "required" if len(used) < 2 else "none"
        model = CHAT.bind_tools(TOOLS, tool_choice=choice, parallel_tool_calls=False, strict=True)
        answer = model.invoke(messages, max_tokens=300)
        assert isinstance(answer, AIMessage)
        messages.append(answer)
        for call in answer.tool_calls:
            by_name = {one.name: one for one in TOOLS}
            result = by_name[call["name"]].invoke(call)
            assert isinstance(result, ToolMessage)
            used.append(f"{call['name']}({call['args']}) = {result.content}")
            messages.append(result)
    assert len(used) == 2
    assert messages[-1].content
    return f"{used}: {messages[-1].content}"


@check
def responses_api() -> None:
    model = ChatOpenAI(**GIVEN, use_responses_api=True, store=False, max_tokens=300)
    assert PARIS in model.invoke(ASK).text
    pieces = list(model.stream(ASK))
    assert PARIS in sum(pieces[1:], pieces[0]).text
    bound = model.bind_tools(TOOLS, tool_choice="required")
    assert bound.invoke(ASK).tool_calls


@check
def errors_are_openais() -> None:
    absent = ChatOpenAI(**GIVEN | {"model": "absent"}, max_retries=0)
    raises(openai.NotFoundError, lambda: absent.invoke(ASK))
    error = raises(openai.BadRequestError, lambda: CHAT.invoke("a " * 9000))
    assert "E1002" in str(error)


@check
def a_closed_stream_stops_the_generation() -> None:
    with HERE.stops_a_generation(1500):
        pieces = CHAT.stream(ASK, max_tokens=1500, extra_body={"ignore_eos": True})
        next(pieces)
        pieces.close()


if __name__ == "__main__":
    main()
