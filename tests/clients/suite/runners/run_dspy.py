"""dspy: predictions, ReAct of two tools, typed signatures, streams."""

from __future__ import annotations

import asyncio
from typing import Literal

import agent_tools
import dspy
from checks import Server, check, main, raises, server
from dspy import lm15

HERE, SCRIPTED = server("openvino"), server("scripted")
ASK = "What is the capital of France?"
lm15.register_provider(
    lm15.ProviderDefinition.chat(
        lm15.AccessPolicy(provider="served", base_url=HERE.openai),
        compat=lm15.OpenAIChatCompat(json_schema="send"),
    ),
    supports=lm15.ModelSupport(function_calling=True, response_schema=True),
)
dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=False)


def model(one: Server, name: str = "") -> dspy.LM:
    return dspy.LM(
        f"served/{name or one.model}",
        api_base=one.openai,
        api_key="none",
        temperature=0,
        max_tokens=300,
        num_retries=0,
    )


@check
def agent_loop() -> str:
    """ReAct in the format that it asks for."""
    with dspy.context(lm=model(SCRIPTED)):
        agent = dspy.ReAct(
            "question -> answer", tools=[agent_tools.temperature, agent_tools.add], max_iters=4
        )
        found = agent(question=agent_tools.task("Bern"))
    steps = [found.trajectory[f"tool_name_{turn}"] for turn in range(3)]
    assert steps == ["temperature", "add", "finish"]
    assert agent_tools.result("Bern") in found.answer
    return found.answer


@check
def native_calls() -> None:
    """Tools of the API, in place of a format in the text."""

    class Sums(dspy.Signature):
        """Use the tools."""

        question: str = dspy.InputField()
        tools: list[dspy.Tool] = dspy.InputField()
        calls: dspy.ToolCalls = dspy.OutputField()

    tools = [dspy.Tool(agent_tools.temperature), dspy.Tool(agent_tools.add)]
    adapter = dspy.ChatAdapter(use_native_function_calling=True)
    with dspy.context(lm=model(SCRIPTED), adapter=adapter):
        found = dspy.Predict(Sums)(question=agent_tools.TASK, tools=tools)
    (call,) = found.calls.tool_calls
    assert (call.name, call.args) == ("temperature", {"city": "Paris"})


@check
def typed_fields_by_a_schema() -> None:
    """The JSON adapter asks for structured output."""

    class Capital(dspy.Signature):
        """Name the capital."""

        country: str = dspy.InputField()
        city: Literal["Paris", "Rome"] = dspy.OutputField()
        large: bool = dspy.OutputField()

    with dspy.context(lm=model(HERE), adapter=dspy.JSONAdapter()):
        found = dspy.Predict(Capital)(country="France")
    assert found.city in ("Paris", "Rome")
    assert isinstance(found.large, bool)


@check
def a_bare_chat() -> None:
    (said,) = model(HERE)(ASK)
    assert "Paris" in said


@check
def a_field_streamed() -> None:
    async def run() -> tuple[list[str], object]:
        listeners = [dspy.streaming.StreamListener(signature_field_name="answer")]
        program = dspy.streamify(
            dspy.ChainOfThought("question -> answer"), stream_listeners=listeners
        )
        with dspy.context(lm=model(SCRIPTED)):
            found = [one async for one in program(question="Say it.")]
        return [one.chunk for one in found[:-1]], found[-1]

    pieces, found = asyncio.run(run())
    # Its listener holds the last ten pieces back, and the end's mark comes in more.
    assert "".join(pieces).startswith(found.answer)
    assert len(pieces) > 1


@check
def errors_are_told() -> None:
    assert "absent" in str(raises(Exception, lambda: model(HERE, "absent")(ASK)))


if __name__ == "__main__":
    main()
