"""llama-index: a function agent and a ReAct one, chats, structured output, tool calls."""

from __future__ import annotations

import asyncio
from typing import Literal

import agent_tools
import pydantic
from checks import Server, check, main, server
from llama_index.core.agent.workflow import AgentStream, FunctionAgent, ToolCallResult
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

HERE, SCRIPTED = server("openvino"), server("scripted")
ASK = "What is the capital of France?"
PARIS = "The capital of France is Paris"
TOOLS = [FunctionTool.from_defaults(one) for one in (agent_tools.temperature, agent_tools.add)]


def model(one: Server, **given: object) -> OpenAILike:
    return OpenAILike(
        model=one.model,
        api_base=one.openai,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=8192,
        max_tokens=300,
        temperature=0,
        max_retries=0,
        **given,
    )


def run(streaming: bool) -> tuple[str, list[str], list[str]]:
    """What the agent says in the end, what it called, and pieces of its text."""

    async def loop() -> tuple[str, list[str], list[str]]:
        agent = FunctionAgent(tools=TOOLS, llm=model(SCRIPTED), streaming=streaming)
        handler = agent.run(agent_tools.TASK)
        called, pieces = [], []
        async for event in handler.stream_events():
            if isinstance(event, ToolCallResult):
                called.append(event.tool_name)
            elif isinstance(event, AgentStream):
                pieces.append(event.delta)
        return str(await handler), called, pieces

    return asyncio.run(loop())


@check
def agent_loop() -> str:
    said, called, _ = run(streaming=False)
    assert called == ["temperature", "add"]
    assert agent_tools.result() in said
    return said


@check
def agent_loop_streamed() -> None:
    said, called, pieces = run(streaming=True)
    assert called == ["temperature", "add"]
    assert agent_tools.result() in said
    assert "".join(pieces).endswith(said)
    assert len(pieces) > 3


@check
def a_chat_whole_and_streamed() -> None:
    one = model(HERE)
    whole = one.chat([ChatMessage(ASK)])
    assert whole.message.content.startswith(PARIS)
    pieces = [piece.delta for piece in one.stream_chat([ChatMessage(ASK)])]
    assert "".join(pieces) == whole.message.content
    assert len(pieces) > 3


@check
def completions() -> None:
    one = model(HERE)
    one.is_chat_model = False
    assert "Paris" in one.complete("The capital of France is").text


@check
def forced_calls() -> None:
    one = model(HERE)
    answer = one.chat_with_tools(TOOLS, user_msg=ASK, tool_required=True)
    assert one.get_tool_calls_from_response(answer)


class City(pydantic.BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]
    large: bool


@check
def structured_output() -> None:
    """By a forced call, and by a schema."""
    for schema in (False, True):
        one = model(HERE, should_use_structured_outputs=schema)
        assert isinstance(one.as_structured_llm(City).chat([ChatMessage(ASK)]).raw, City)


if __name__ == "__main__":
    main()
