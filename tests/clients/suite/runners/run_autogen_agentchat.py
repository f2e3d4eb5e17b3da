"""autogen: an assistant with two tools whole and streamed, a team of two, structured output."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Literal

import agent_tools
import pydantic
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import ModelClientStreamingChunkEvent, ToolCallRequestEvent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from checks import Server, check, main, server

HERE, SCRIPTED = server("openvino"), server("scripted")
ASK = "What is the capital of France?"
PARIS = "The capital of France is Paris"
TOOLS = [
    FunctionTool(one, description=str(one.__doc__))
    for one in (agent_tools.temperature, agent_tools.add)
]
INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": "unknown",
}


def model(one: Server, **given: object) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(
        model=one.model,
        base_url=one.openai,
        api_key="none",
        model_info=INFO,
        max_retries=0,
        temperature=0,
        max_tokens=300,
        **given,
    )


def do(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def assistant(one: Server, **given: object) -> AssistantAgent:
    return AssistantAgent("sums", model(one), **given)


def check_loop(found: TaskResult) -> str:
    calls = [
        call.name
        for message in found.messages
        if isinstance(message, ToolCallRequestEvent)
        for call in message.content
    ]
    assert calls == ["temperature", "add"]
    said = found.messages[-1].content
    assert agent_tools.result() in said
    return said


@check
def agent_loop() -> str:
    agent = assistant(SCRIPTED, tools=TOOLS, max_tool_iterations=3)
    return check_loop(do(agent.run(task=agent_tools.TASK)))


@check
def agent_loop_streamed() -> None:
    async def run() -> tuple[list[str], TaskResult]:
        agent = assistant(SCRIPTED, tools=TOOLS, max_tool_iterations=3, model_client_stream=True)
        found = [event async for event in agent.run_stream(task=agent_tools.TASK)]
        chunks = [one for one in found if isinstance(one, ModelClientStreamingChunkEvent)]
        return [one.content for one in chunks], found[-1]

    pieces, found = do(run())
    assert "".join(pieces).endswith(check_loop(found))
    assert len(pieces) > 2


@check
def a_team_takes_turns() -> None:
    async def run() -> TaskResult:
        first, second = (AssistantAgent(name, model(HERE)) for name in ("one", "two"))
        team = RoundRobinGroupChat([first, second], termination_condition=MaxMessageTermination(3))
        return await team.run(task=ASK)

    found = do(run())
    assert [message.source for message in found.messages] == ["user", "one", "two"]
    assert found.messages[1].content.startswith(PARIS)


@check
def forced_calls() -> None:
    ask = [UserMessage(content=ASK, source="user")]
    answer = do(model(HERE).create(ask, tools=TOOLS, tool_choice="required"))
    assert answer.finish_reason == "function_calls"
    assert answer.content[0].name in ("temperature", "add")


class City(pydantic.BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]
    large: bool


@check
def structured_output() -> None:
    agent = assistant(HERE, output_content_type=City)
    assert isinstance(do(agent.run(task=ASK)).messages[-1].content, City)


if __name__ == "__main__":
    main()
