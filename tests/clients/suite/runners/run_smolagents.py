"""smolagents: a tool-calling agent whole and streamed, the code agent, chats, schemas."""

from __future__ import annotations

import agent_tools
from checks import Server, check, main, server
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool
from smolagents.memory import ActionStep
from smolagents.models import ChatMessage, ChatMessageStreamDelta

HERE, SCRIPTED = server("openvino"), server("scripted")
ASK = [{"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]}]
OSLO = agent_tools.result("Oslo")


@tool
def temperature(city: str) -> str:
    """Temperature in a city, in millikelvin.

    Args:
        city: Name of the city.
    """
    return agent_tools.temperature(city)


@tool
def add(a: int, b: int) -> str:
    """Sum of two numbers.

    Args:
        a: First number.
        b: Second number.
    """
    return agent_tools.add(a, b)


def model(one: Server, **given: object) -> OpenAIModel:
    return OpenAIModel(one.model, api_base=one.openai, api_key="none", **given)


def agent(**given: object) -> ToolCallingAgent:
    return ToolCallingAgent([temperature, add], model(SCRIPTED), verbosity_level=0, **given)


def calls_of(found: ToolCallingAgent) -> list[str]:
    steps = [step for step in found.memory.steps if isinstance(step, ActionStep)]
    return [call.name for step in steps for call in step.tool_calls or []]


@check
def agent_loop() -> str:
    """Each of its turns must call a tool, the last one its own for answers."""
    one = agent()
    said = one.run(agent_tools.task("Oslo"))
    assert calls_of(one) == ["temperature", "add", "final_answer"]
    assert OSLO in said
    return said


@check
def agent_loop_streamed() -> None:
    one = agent(stream_outputs=True)
    steps = list(one.run(agent_tools.task("Oslo"), stream=True))
    assert any(isinstance(step, ChatMessageStreamDelta) for step in steps)
    assert calls_of(one) == ["temperature", "add", "final_answer"]
    assert OSLO in steps[-1].output


@check
def the_agent_goes_on_by_the_model() -> None:
    """The demo model calls what it likes, as it must; after two turns it is asked for an answer."""
    one = ToolCallingAgent(
        [temperature, add],
        model(HERE, temperature=0, max_tokens=200),
        verbosity_level=0,
        max_steps=2,
    )
    assert one.run("What is 3 plus 4?")
    assert calls_of(one)


@check
def code_agent_with_structured_output() -> None:
    """Its steps are JSON of a schema: thought and code."""
    one = CodeAgent(
        [],
        model(HERE, temperature=0, max_tokens=200),
        use_structured_outputs_internally=True,
        verbosity_level=0,
        max_steps=1,
    )
    one.run("What is 3 plus 4?")
    step = next(step for step in one.memory.steps if isinstance(step, ActionStep))
    assert step.model_output.lstrip().startswith("{")


@check
def a_chat_whole_and_streamed() -> None:
    one = model(HERE, temperature=0, max_tokens=64)
    whole = one.generate(ASK)
    assert isinstance(whole, ChatMessage)
    assert "Paris" in whole.content
    assert whole.token_usage.output_tokens > 2
    pieces = [delta.content or "" for delta in one.generate_stream(ASK)]
    assert "".join(pieces) == whole.content


if __name__ == "__main__":
    main()
