"""openai-agents: runs of agents with two tools by two APIs, a stored response, typed outputs."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import agents
import openai
from cases import FUNCTIONS, TASK, City, cases, result_in
from checks import Server, check, main, server

HERE, SCRIPTED = server("openvino"), server("scripted")
GREEDY = agents.ModelSettings(temperature=0, max_tokens=300)
TOOLS = [agents.function_tool(one) for one in FUNCTIONS.values()]
KINDS = {
    "chats": agents.OpenAIChatCompletionsModel,
    "responses": agents.OpenAIResponsesModel,
}
agents.set_tracing_disabled(True)


def agent(one: Server, by: str, **given: object) -> agents.Agent:
    client = openai.AsyncOpenAI(base_url=one.openai, api_key="none", max_retries=0)
    return agents.Agent(name="Sums", model=KINDS[by](one.model, client), **given)


def loop(by: str, task: str, streamed: bool) -> tuple[list[str], str, list[str]]:
    async def run() -> tuple[Any, list[str]]:
        worker = agent(SCRIPTED, by, tools=TOOLS)
        if not streamed:
            return await agents.Runner.run(worker, task), []
        found = agents.Runner.run_streamed(worker, task)
        pieces = [
            event.data.delta
            async for event in found.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        return found, pieces

    found, pieces = asyncio.run(run())
    calls = [item for item in found.new_items if item.type == "tool_call_item"]
    return [call.raw_item.name for call in calls], found.final_output, pieces


def chat(by: str, prompt: str) -> tuple[str, int]:
    worker = agent(HERE, by, instructions="You are helpful.", model_settings=GREEDY)
    found = agents.Runner.run_sync(worker, prompt)
    return found.final_output, found.context_wrapper.usage.output_tokens


def typed(by: str, prompt: str) -> City:
    worker = agent(HERE, by, output_type=City, model_settings=GREEDY)
    return agents.Runner.run_sync(worker, prompt).final_output


for api in KINDS:
    cases(
        api,
        agent_loop=partial(loop, api),
        chat=partial(chat, api),
        structured_output=partial(typed, api),
    )


@check
def a_stored_response_is_continued() -> None:
    """The second turn sends only its own input, and the id of the first."""
    first = agents.Runner.run_sync(agent(SCRIPTED, "responses", tools=TOOLS), TASK)
    second = agents.Runner.run_sync(
        agent(SCRIPTED, "responses"), "Thanks.", previous_response_id=first.last_response_id
    )
    assert result_in() in second.final_output


if __name__ == "__main__":
    main()
