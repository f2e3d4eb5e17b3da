"""openai-agents: runs of agents with two tools by two APIs, a handoff, typed outputs."""

from __future__ import annotations

import asyncio
from typing import Literal

import agent_tools
import agents
import openai
import pydantic
from checks import Server, check, main, server

HERE, SCRIPTED = server("openvino"), server("scripted")
ASK = "What is the capital of France?"
GREEDY = agents.ModelSettings(temperature=0, max_tokens=300)
TOOLS = [agents.function_tool(one) for one in (agent_tools.temperature, agent_tools.add)]
agents.set_tracing_disabled(True)


def client(one: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=one.openai, api_key="none", max_retries=0)


def chat(one: Server) -> agents.Model:
    return agents.OpenAIChatCompletionsModel(one.model, client(one))


def responses(one: Server) -> agents.Model:
    return agents.OpenAIResponsesModel(one.model, client(one))


def agent(model: agents.Model, **given: object) -> agents.Agent:
    return agents.Agent(name="Sums", instructions="Use the tools.", model=model, **given)


def loop(model: agents.Model) -> str:
    found = agents.Runner.run_sync(agent(model, tools=TOOLS), agent_tools.TASK)
    kinds = [item.type for item in found.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item"] * 2 + ["message_output_item"]
    assert agent_tools.result() in found.final_output
    return found.final_output


def streamed(model: agents.Model) -> None:
    async def run() -> tuple[str, list[str]]:
        found = agents.Runner.run_streamed(agent(model, tools=TOOLS), agent_tools.TASK)
        pieces = [
            event.data.delta
            async for event in found.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        return found.final_output, pieces

    output, pieces = asyncio.run(run())
    assert agent_tools.result() in output
    assert "".join(pieces) == output


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
def a_stored_response_is_gone_on_with() -> None:
    """The second turn sends its own input alone, and the id of the first."""
    first = agents.Runner.run_sync(agent(responses(SCRIPTED), tools=TOOLS), agent_tools.TASK)
    second = agents.Runner.run_sync(
        agent(responses(SCRIPTED)), "Thanks.", previous_response_id=first.last_response_id
    )
    assert agent_tools.result() in second.final_output


@check
def a_forced_call_of_the_model() -> None:
    """On the demo model the first turn must call; the next ones may."""
    called = []

    @agents.function_tool
    def add(a: int, b: int) -> str:
        """Sum of two numbers."""
        called.append((a, b))
        return agent_tools.add(a, b)

    forced = agents.ModelSettings(temperature=0, max_tokens=300, tool_choice="required")
    for model in (chat(HERE), responses(HERE)):
        found = agents.Runner.run_sync(agent(model, tools=[add], model_settings=forced), ASK)
        assert found.final_output
    assert len(called) >= 2


class City(pydantic.BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]
    large: bool


@check
def typed_output() -> None:
    for model in (chat(HERE), responses(HERE)):
        typed = agent(model, output_type=City, model_settings=GREEDY)
        assert isinstance(agents.Runner.run_sync(typed, ASK).final_output, City)


if __name__ == "__main__":
    main()
