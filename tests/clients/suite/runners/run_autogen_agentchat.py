"""autogen: an assistant with two tools whole and streamed, a team of two, structured output."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import ModelClientStreamingChunkEvent, ToolCallRequestEvent
from autogen_core.models import UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from cases import FUNCTIONS, City, cases
from checks import Server, main, server

HERE, SCRIPTED = server("openvino"), server("scripted")
TOOLS = [FunctionTool(one, description=str(one.__doc__)) for one in FUNCTIONS.values()]
ABLE = ("function_calling", "json_output", "structured_output")
INFO = {**dict.fromkeys(ABLE, True), "vision": False, "family": "unknown"}


def model(one: Server = HERE) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(
        model=one.model,
        base_url=one.openai,
        api_key="none",
        model_info=INFO,
        max_retries=0,
        temperature=0,
        max_tokens=300,
    )


def create(prompt: str, **given: object) -> Any:
    return asyncio.run(model().create([UserMessage(content=prompt, source="user")], **given))


def chat(prompt: str) -> tuple[str, int]:
    answer = create(prompt)
    return answer.content, answer.usage.completion_tokens


def forced_call(prompt: str) -> tuple[str, dict[str, Any]]:
    (call,) = create(prompt, tools=TOOLS, tool_choice="required").content
    return call.name, json.loads(call.arguments)


def loop(task: str, streamed: bool) -> tuple[list[str], str, list[str]]:
    async def run() -> list[Any]:
        agent = AssistantAgent(
            "sums",
            model(SCRIPTED),
            tools=TOOLS,
            max_tool_iterations=3,
            model_client_stream=streamed,
        )
        return [event async for event in agent.run_stream(task=task)]

    *events, found = asyncio.run(run())
    asked = [event for event in events if isinstance(event, ToolCallRequestEvent)]
    chunks = [event for event in events if isinstance(event, ModelClientStreamingChunkEvent)]
    called = [call.name for event in asked for call in event.content]
    return called, found.messages[-1].content, [chunk.content for chunk in chunks]


def structured_output(prompt: str) -> City:
    agent = AssistantAgent("typed", model(), output_content_type=City)
    return asyncio.run(agent.run(task=prompt)).messages[-1].content


cases(
    chat=chat,
    agent_loop=loop,
    forced_call=forced_call,
    structured_output=structured_output,
)


if __name__ == "__main__":
    main()
