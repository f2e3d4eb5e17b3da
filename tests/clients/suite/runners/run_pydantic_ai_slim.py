"""pydantic-ai: agents of two tools by three APIs, whole and streamed, typed outputs, errors."""

from __future__ import annotations

import asyncio
from typing import Literal

import agent_tools
import pydantic
from checks import Server, check, main, raises, server
from pydantic_ai import Agent, ModelHTTPError, NativeOutput
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

HERE, SCRIPTED = server("openvino"), server("scripted")
ASK = "What is the capital of France?"
TOOLS = [agent_tools.temperature, agent_tools.add]
GREEDY = {"extra_body": {"temperature": 0}, "max_tokens": 300}
"""Anthropic's client has no field for it any more."""


def chat(one: Server, name: str = "") -> Model:
    provider = OpenAIProvider(base_url=one.openai, api_key="none")
    return OpenAIChatModel(name or one.model, provider=provider)


def responses(one: Server) -> Model:
    provider = OpenAIProvider(base_url=one.openai, api_key="none")
    return OpenAIResponsesModel(one.model, provider=provider)


def messages(one: Server) -> Model:
    provider = AnthropicProvider(base_url=one.openai.removesuffix("/v1"), api_key="none")
    return AnthropicModel(one.model, provider=provider)


def loop(model: Model) -> str:
    """Both tools are called, in turn, and the answer is of their results."""
    found = Agent(model, tools=TOOLS).run_sync(agent_tools.TASK)
    calls = [
        part.tool_name
        for message in found.all_messages()
        for part in message.parts
        if isinstance(part, ToolCallPart)
    ]
    assert calls == ["temperature", "add"]
    assert agent_tools.result() in found.output
    assert found.usage.requests == 3
    return found.output


def streamed(model: Model) -> None:
    async def run() -> str:
        pieces, calls = [], 0
        agent = Agent(model, tools=TOOLS)
        async with agent.iter(agent_tools.TASK) as run:
            async for node in run:
                if Agent.is_model_request_node(node):
                    async with node.stream(run.ctx) as stream:
                        pieces = [text async for text in stream.stream_text(delta=True)]
                        calls += len(stream.response.tool_calls)
        assert calls == 2
        assert "".join(pieces) == run.result.output
        return run.result.output

    assert agent_tools.result() in asyncio.run(run())


@check
def agent_loop_by_chats() -> str:
    return loop(chat(SCRIPTED))


@check
def agent_loop_by_chats_streamed() -> None:
    streamed(chat(SCRIPTED))


@check
def agent_loop_by_responses() -> str:
    return loop(responses(SCRIPTED))


@check
def agent_loop_by_responses_streamed() -> None:
    streamed(responses(SCRIPTED))


@check
def agent_loop_by_messages() -> str:
    return loop(messages(SCRIPTED))


@check
def agent_loop_by_messages_streamed() -> None:
    streamed(messages(SCRIPTED))


class City(pydantic.BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]
    large: bool


@check
def a_chat_by_three_apis() -> None:
    for model in (chat(HERE), responses(HERE), messages(HERE)):
        assert "Paris" in Agent(model, model_settings=GREEDY).run_sync(ASK).output


@check
def typed_output_by_a_forced_call() -> None:
    found = Agent(chat(HERE), output_type=City, model_settings=GREEDY).run_sync(ASK)
    assert isinstance(found.output, City)


@check
def typed_output_by_a_schema() -> None:
    native = NativeOutput(City, strict=True)
    assert isinstance(
        Agent(chat(HERE), output_type=native, model_settings=GREEDY).run_sync(ASK).output, City
    )


@check
def errors_are_typed() -> None:
    absent = Agent(chat(HERE, "absent"))
    assert raises(ModelHTTPError, lambda: absent.run_sync(ASK)).status_code == 404


if __name__ == "__main__":
    main()
