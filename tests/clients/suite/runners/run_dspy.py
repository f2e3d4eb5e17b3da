"""dspy: predictions, ReAct of two tools, typed signatures, streams."""

from __future__ import annotations

import asyncio
from typing import Literal

import dspy
from cases import ASK, FUNCTIONS, TASK, cases, result_in
from checks import Server, check, main, server
from dspy import lm15

HERE, SCRIPTED = server("openvino"), server("scripted")
lm15.register_provider(
    lm15.ProviderDefinition.chat(
        lm15.AccessPolicy(provider="served", base_url=HERE.openai),
        compat=lm15.OpenAIChatCompat(json_schema="send"),
    ),
    supports=lm15.ModelSupport(function_calling=True, response_schema=True),
)
dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=False)


def model(one: Server, name: str = "") -> dspy.LM:
    where = {"api_base": one.openai, "api_key": "none", "num_retries": 0}
    return dspy.LM(f"served/{name or one.model}", **where, temperature=0, max_tokens=300)


cases(an_absent_model=lambda name: model(HERE, name)(ASK))


@check
def agent_loop() -> str:
    """ReAct in the format that it asks for."""
    with dspy.context(lm=model(SCRIPTED)):
        agent = dspy.ReAct("question -> answer", tools=[*FUNCTIONS.values()], max_iters=4)
        found = agent(question=TASK.replace("Paris", "Bern"))
    steps = [found.trajectory[f"tool_name_{turn}"] for turn in range(3)]
    assert steps == [*FUNCTIONS, "finish"]
    assert result_in("Bern") in found.answer
    return found.answer


@check
def native_calls() -> None:
    """Tools of the API, in place of a format in the text."""

    class Sums(dspy.Signature):
        """Use the tools."""

        question: str = dspy.InputField()
        tools: list[dspy.Tool] = dspy.InputField()
        calls: dspy.ToolCalls = dspy.OutputField()

    tools = [dspy.Tool(function) for function in FUNCTIONS.values()]
    adapter = dspy.ChatAdapter(use_native_function_calling=True)
    with dspy.context(lm=model(SCRIPTED), adapter=adapter):
        found = dspy.Predict(Sums)(question=TASK, tools=tools)
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
def a_field_streamed() -> None:
    async def run() -> tuple[list[str], object]:
        listeners = [dspy.streaming.StreamListener(signature_field_name="answer")]
        program = dspy.ChainOfThought("question -> answer")
        with dspy.context(lm=model(SCRIPTED)):
            streamed = dspy.streamify(program, stream_listeners=listeners)
            found = [one async for one in streamed(question="Say it.")]
        return [one.chunk for one in found[:-1]], found[-1]

    pieces, found = asyncio.run(run())
    # Its listener holds the last ten pieces back, and the end's mark comes in more.
    assert "".join(pieces).startswith(found.answer)
    assert len(pieces) > 1


if __name__ == "__main__":
    main()
