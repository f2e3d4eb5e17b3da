"""pydantic-ai: agents of two tools by three APIs, whole and streamed, typed outputs, errors."""

from __future__ import annotations

import asyncio
from functools import partial

from cases import ASK, FUNCTIONS, City, cases
from checks import Server, main, server
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

HERE, SCRIPTED = server("openvino"), server("scripted")
GREEDY = {"extra_body": {"temperature": 0}, "max_tokens": 300}
"""Anthropic's client has no field for it any more."""
KINDS = {"chats": OpenAIChatModel, "responses": OpenAIResponsesModel, "messages": AnthropicModel}


def model(one: Server, by: str, name: str = "") -> Model:
    if by == "messages":
        provider = AnthropicProvider(base_url=one.origin, api_key="none")
    else:
        provider = OpenAIProvider(base_url=one.openai, api_key="none")
    return KINDS[by](name or one.model, provider=provider)


def chat(by: str, prompt: str) -> tuple[str, int]:
    agent = Agent(model(HERE, by), model_settings=GREEDY, system_prompt="You are helpful.")
    found = agent.run_sync(prompt)
    return found.output, found.usage.output_tokens


def loop(by: str, task: str, streamed: bool) -> tuple[list[str], str, list[str]]:
    agent = Agent(model(SCRIPTED, by), tools=[*FUNCTIONS.values()])

    async def run() -> tuple[object, list[str]]:
        pieces: list[str] = []
        async with agent.iter(task) as run:
            async for node in run:
                if streamed and Agent.is_model_request_node(node):
                    async with node.stream(run.ctx) as stream:
                        pieces = [
                            text async for text in stream.stream_text(delta=True, debounce_by=None)
                        ]
        return run.result, pieces

    found, pieces = asyncio.run(run())
    parts = (part for message in found.all_messages() for part in message.parts)
    called = [part.tool_name for part in parts if isinstance(part, ToolCallPart)]
    return called, found.output, pieces


def typed(output: object, prompt: str) -> City:
    agent = Agent(model(HERE, "chats"), output_type=output, model_settings=GREEDY)
    return agent.run_sync(prompt).output


for api in KINDS:
    cases(api, agent_loop=partial(loop, api), chat=partial(chat, api))
cases("a forced call", structured_output=partial(typed, City))
cases("a schema", structured_output=partial(typed, NativeOutput(City, strict=True)))
cases(an_absent_model=lambda name: Agent(model(HERE, "chats", name)).run_sync(ASK))


if __name__ == "__main__":
    main()
