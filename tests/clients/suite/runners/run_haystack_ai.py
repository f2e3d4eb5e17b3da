"""haystack: its agent, a pipeline, chats and responses whole and streamed, structured output."""

from __future__ import annotations

from typing import Literal

import agent_tools
import pydantic
from checks import Server, check, main, server
from haystack import Pipeline
from haystack.components.agents import Agent
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import create_tool_from_function
from haystack.utils import Secret

HERE, SCRIPTED = server("openvino"), server("scripted")
ASK = "What is the capital of France?"
PARIS = "The capital of France is Paris"
TOOLS = [create_tool_from_function(one) for one in (agent_tools.temperature, agent_tools.add)]
GREEDY = {"temperature": 0, "max_tokens": 300}


def generator(
    one: Server, kind: type = OpenAIChatGenerator, **given: object
) -> OpenAIChatGenerator | OpenAIResponsesChatGenerator:
    key = Secret.from_token("none")
    return kind(api_key=key, model=one.model, api_base_url=one.openai, max_retries=0, **given)


def loop(kind: type, **given: object) -> str:
    agent = Agent(chat_generator=generator(SCRIPTED, kind), tools=TOOLS, **given)
    messages = agent.run(messages=[ChatMessage.from_user(agent_tools.TASK)])["messages"]
    called = [call.tool_name for message in messages for call in message.tool_calls]
    assert called == ["temperature", "add"]
    assert agent_tools.result() in messages[-1].text
    return messages[-1].text


def streamed(kind: type) -> None:
    pieces: list[StreamingChunk] = []
    said = loop(kind, streaming_callback=pieces.append)
    assert "".join(piece.content or "" for piece in pieces).endswith(said)
    assert len(pieces) > 3


@check
def agent_loop_by_chats() -> str:
    return loop(OpenAIChatGenerator)


@check
def agent_loop_by_chats_streamed() -> None:
    streamed(OpenAIChatGenerator)


@check
def agent_loop_by_responses() -> str:
    return loop(OpenAIResponsesChatGenerator)


@check
def agent_loop_by_responses_streamed() -> None:
    streamed(OpenAIResponsesChatGenerator)


@check
def a_pipeline() -> None:
    pipeline = Pipeline()
    template = [ChatMessage.from_user("What is the capital of {{ country }}?")]
    pipeline.add_component("prompt", ChatPromptBuilder(template, required_variables="*"))
    pipeline.add_component("model", generator(HERE, generation_kwargs=GREEDY))
    pipeline.connect("prompt", "model")
    (reply,) = pipeline.run({"prompt": {"country": "France"}})["model"]["replies"]
    assert reply.text.startswith(PARIS)
    assert reply.meta["usage"]["completion_tokens"] > 2


@check
def a_chat_streamed() -> None:
    pieces: list[str] = []
    given = {
        "generation_kwargs": GREEDY,
        "streaming_callback": lambda one: pieces.append(one.content),
    }
    (reply,) = generator(HERE, **given).run([ChatMessage.from_user(ASK)])["replies"]
    assert reply.text.startswith(PARIS)
    assert "".join(pieces) == reply.text


@check
def forced_calls() -> None:
    given = {"generation_kwargs": {**GREEDY, "tool_choice": "required"}, "tools": TOOLS}
    (reply,) = generator(HERE, **given).run([ChatMessage.from_user(ASK)])["replies"]
    assert reply.tool_calls


class City(pydantic.BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]
    large: bool


@check
def structured_output() -> None:
    given = {"generation_kwargs": {**GREEDY, "response_format": City}}
    (reply,) = generator(HERE, **given).run([ChatMessage.from_user(ASK)])["replies"]
    assert City.model_validate_json(reply.text)


if __name__ == "__main__":
    main()
