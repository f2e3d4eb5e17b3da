"""haystack: its agent, a pipeline, chats and responses whole and streamed, structured output."""

from __future__ import annotations

from functools import partial
from typing import Any

from cases import FUNCTIONS, City, cases
from checks import Server, main, server
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret

HERE, SCRIPTED = server("openvino"), server("scripted")
TOOLS = [create_tool_from_function(one) for one in FUNCTIONS.values()]
KINDS = {"chats": OpenAIChatGenerator, "responses": OpenAIResponsesChatGenerator}


def generator(one: Server, by: str = "chats", **given: object) -> Any:
    key = Secret.from_token("none")
    return KINDS[by](api_key=key, model=one.model, api_base_url=one.openai, max_retries=0, **given)


def reply(prompt: str, given: dict[str, Any] | None = None, **fields: object) -> ChatMessage:
    greedy = {"temperature": 0, "max_tokens": 300, **fields}
    model = generator(HERE, generation_kwargs=greedy, **(given or {}))
    (found,) = model.run([ChatMessage.from_user(prompt)])["replies"]
    return found


def chat(prompt: str) -> tuple[str, int]:
    found = reply(prompt)
    return found.text, found.meta["usage"]["completion_tokens"]


def chat_streamed(prompt: str) -> list[str]:
    pieces: list[str] = []
    reply(prompt, {"streaming_callback": lambda piece: pieces.append(piece.content)})
    return pieces


def loop(by: str, task: str, streamed: bool) -> tuple[list[str], str, list[str]]:
    pieces: list[str] = []
    given = {}
    if streamed:
        given["streaming_callback"] = lambda piece: pieces.append(piece.content or "")
    agent = Agent(chat_generator=generator(SCRIPTED, by), tools=TOOLS, **given)
    messages = agent.run(messages=[ChatMessage.from_user(task)])["messages"]
    called = [call.tool_name for message in messages for call in message.tool_calls]
    return called, messages[-1].text, pieces


def forced_call(prompt: str) -> tuple[str, dict[str, Any]]:
    call = reply(prompt, {"tools": TOOLS}, tool_choice="required").tool_calls[0]
    return call.tool_name, call.arguments


def structured_output(prompt: str) -> City:
    return City.model_validate_json(reply(prompt, response_format=City).text)


for api in KINDS:
    cases(api, agent_loop=partial(loop, api))
cases(
    chat=chat,
    chat_streamed=chat_streamed,
    forced_call=forced_call,
    structured_output=structured_output,
)


if __name__ == "__main__":
    main()
