"""smolagents: a tool-calling agent whole and streamed, the code agent, chats, schemas."""

from __future__ import annotations

from collections.abc import Iterator

from cases import FUNCTIONS, TASK, cases, result_in
from checks import Server, add, check, main, server
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool
from smolagents.memory import ActionStep

HERE, SCRIPTED = server("openvino"), server("scripted")
OSLO = TASK.replace("Paris", "Oslo")
ARGUMENTS = "\n\n    Args:\n        city: Its name.\n        a: A number.\n        b: Another."
for function in FUNCTIONS.values():
    function.__doc__ = f"{function.__doc__}{ARGUMENTS}"  # it reads them
TOOLS = [tool(function) for function in FUNCTIONS.values()]


def model(one: Server, **given: object) -> OpenAIModel:
    return OpenAIModel(one.model, api_base=one.openai, api_key="none", **given)


def messages(prompt: str) -> list[dict[str, object]]:
    return [{"role": "user", "content": [{"type": "text", "text": prompt}]}]


def chat(prompt: str) -> tuple[str, int]:
    answer = model(HERE, temperature=0, max_tokens=64).generate(messages(prompt))
    return answer.content, answer.token_usage.output_tokens


def chat_streamed(prompt: str) -> Iterator[str]:
    stream = model(HERE, temperature=0, max_tokens=64).generate_stream(messages(prompt))
    return (delta.content or "" for delta in stream)


cases(chat=chat, chat_streamed=chat_streamed)


def loop(streamed: bool) -> str:
    """Each of its turns must call a tool, the last one its own for answers."""
    agent = ToolCallingAgent(TOOLS, model(SCRIPTED), verbosity_level=0, stream_outputs=streamed)
    found = agent.run(OSLO, stream=streamed)
    said = str([*found][-1].output if streamed else found)
    steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
    called = [call.name for step in steps for call in step.tool_calls or []]
    assert called == [*FUNCTIONS, "final_answer"]
    assert result_in("Oslo") in said
    return said


add("agent loop", lambda: loop(False))
add("agent loop streamed", lambda: loop(True))


@check
def code_agent_with_structured_output() -> None:
    """Its steps are JSON of a schema: thought and code."""
    agent = CodeAgent(
        [],
        model(HERE, temperature=0, max_tokens=200),
        use_structured_outputs_internally=True,
        verbosity_level=0,
        max_steps=1,
    )
    agent.run("What is 3 plus 4?")
    step = next(step for step in agent.memory.steps if isinstance(step, ActionStep))
    assert step.model_output.lstrip().startswith("{")


if __name__ == "__main__":
    main()
