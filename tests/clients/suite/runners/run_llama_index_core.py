"""llama-index: a function agent, chats, completions, structured output, tool calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

from cases import FUNCTIONS, City, cases
from checks import Server, main, server
from llama_index.core.agent.workflow import AgentStream, FunctionAgent, ToolCallResult
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

HERE, SCRIPTED = server("openvino"), server("scripted")
TOOLS = [FunctionTool.from_defaults(one) for one in FUNCTIONS.values()]


def model(one: Server = HERE, **given: object) -> OpenAILike:
    fields = {
        "is_chat_model": True,
        "is_function_calling_model": True,
        "context_window": 8192,
        "max_tokens": 300,
        "temperature": 0,
        "max_retries": 0,
    }
    return OpenAILike(one.model, api_base=one.openai, api_key="none", **{**fields, **given})


def chat(prompt: str) -> tuple[str, int]:
    answer = model().chat([ChatMessage(prompt)])
    return answer.message.content, answer.raw.usage.completion_tokens


def chat_streamed(prompt: str) -> Iterator[str]:
    return (piece.delta for piece in model().stream_chat([ChatMessage(prompt)]))


def loop(task: str, streamed: bool) -> tuple[list[str], str, list[str]]:
    async def run() -> tuple[list[str], str, list[str]]:
        agent = FunctionAgent(tools=TOOLS, llm=model(SCRIPTED), streaming=streamed)
        handler = agent.run(task)
        called, pieces = [], []
        async for event in handler.stream_events():
            if isinstance(event, ToolCallResult):
                called.append(event.tool_name)
            elif isinstance(event, AgentStream):
                pieces.append(event.delta)
        return called, str(await handler), pieces

    return asyncio.run(run())


def forced_call(prompt: str) -> tuple[str, dict[str, Any]]:
    answer = model().chat_with_tools(TOOLS, user_msg=prompt, tool_required=True)
    call = model().get_tool_calls_from_response(answer)[0]
    return call.tool_name, call.tool_kwargs


def typed(schema: bool, prompt: str) -> City:
    structured = model(should_use_structured_outputs=schema).as_structured_llm(City)
    return structured.chat([ChatMessage(prompt)]).raw


cases(
    chat=chat,
    chat_streamed=chat_streamed,
    completions=lambda prompt: model(is_chat_model=False).complete(prompt, max_tokens=4).text,
    agent_loop=loop,
    forced_call=forced_call,
)
cases("a forced call", structured_output=partial(typed, False))
cases("a schema", structured_output=partial(typed, True))


if __name__ == "__main__":
    main()
