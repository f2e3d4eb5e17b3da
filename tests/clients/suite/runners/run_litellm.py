"""litellm: chats, completions, tools, structured output, errors, retries, cancellation."""

from __future__ import annotations

import asyncio
import json
from typing import Literal

import agent_tools
import litellm
import pydantic
from agent_tools import TOOLS
from checks import check, main, raises, server

HERE = server("openvino")
GIVEN = {"model": f"openai/{HERE.model}", "api_base": HERE.openai, "api_key": "none"}
ASK = [{"role": "user", "content": "What is the capital of France?"}]
LONG = {"messages": ASK, "max_tokens": 1500, "ignore_eos": True}
PARIS = "The capital of France is Paris"
litellm.telemetry = False


def joined(pieces: object) -> str:
    """The text; the last piece of a stream has the usage and, as OpenAI's, no choice."""
    return "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)


@check
def chat() -> None:
    answer = litellm.completion(**GIVEN, messages=ASK, temperature=0, max_tokens=32)
    assert answer.choices[0].message.content.startswith(PARIS)
    assert answer.usage.completion_tokens > 2


@check
def chat_streamed() -> None:
    stream = litellm.completion(
        **GIVEN, messages=ASK, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    pieces = list(stream)
    assert joined(pieces).startswith(PARIS)
    assert litellm.stream_chunk_builder(pieces).usage.completion_tokens > 2


@check
def as_a_vllm_server() -> None:
    given = GIVEN | {"model": f"hosted_vllm/{HERE.model}", "messages": ASK, "max_tokens": 16}
    cities = ["Paris", "Rome"]
    answer = litellm.completion(**given, temperature=0, min_p=0.1, top_k=1, guided_choice=cities)
    assert answer.choices[0].message.content == "Paris"
    assert joined(litellm.completion(**given, temperature=0, stream=True))


@check
def completions() -> None:
    given = GIVEN | {"model": f"text-completion-openai/{HERE.model}"}
    answer = litellm.text_completion(
        **given, prompt="The capital of France is", temperature=0, max_tokens=4
    )
    assert answer.choices[0].text.startswith(" Paris")


@check
def asyncio_at_once() -> None:
    async def four() -> list:
        asking = (litellm.acompletion(**GIVEN, messages=ASK, temperature=0) for _ in range(4))
        return await asyncio.gather(*asking)

    for answer in asyncio.run(four()):
        assert answer.choices[0].message.content.startswith(PARIS)


class City(pydantic.BaseModel):
    name: Literal["Paris", "Rome"]
    large: bool


@check
def structured_output() -> None:
    answer = litellm.completion(**GIVEN, messages=ASK, response_format=City, max_tokens=100)
    City.model_validate_json(answer.choices[0].message.content)


@check
def tools_and_tool_messages() -> None:
    given = GIVEN | {"tools": TOOLS, "temperature": 0, "max_tokens": 200}
    answer = litellm.completion(
        **given, messages=ASK, tool_choice="required", parallel_tool_calls=False
    )
    message = answer.choices[0].message
    (call,) = message.tool_calls
    result = agent_tools.call(call.function.name, json.loads(call.function.arguments))
    messages = [*ASK, message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    assert litellm.completion(**given, messages=messages, tool_choice="none").choices


@check
def tool_calls_streamed() -> None:
    named = {"type": "function", "function": {"name": "add"}}
    stream = litellm.completion(
        **GIVEN, messages=ASK, tools=TOOLS, tool_choice=named, stream=True, max_tokens=200
    )
    whole = litellm.stream_chunk_builder(list(stream))
    (call,) = whole.choices[0].message.tool_calls
    assert json.loads(call.function.arguments).keys() == {"a", "b"}


@check
def responses_api() -> None:
    answer = litellm.responses(**GIVEN, input="What is the capital of France?", temperature=0)
    assert "Paris" in answer.output[0].content[0].text


@check
def errors_are_typed() -> None:
    def ask(**fields: object) -> object:
        return litellm.completion(**{**GIVEN, "messages": ASK, "max_tokens": 2, **fields})

    raises(litellm.NotFoundError, lambda: ask(model="openai/absent"))
    raises(litellm.BadRequestError, lambda: ask(temperature=-1))
    long = [{"role": "user", "content": "a " * 9000}]
    raises(litellm.ContextWindowExceededError, lambda: ask(messages=long))
    raises(litellm.Timeout, lambda: ask(**LONG, timeout=0.2))


@check
def a_router_retries_and_falls_back() -> None:
    model = {"model_name": "small", "litellm_params": GIVEN}
    absent = {"model_name": "absent", "litellm_params": GIVEN | {"model": "openai/absent"}}
    router = litellm.Router([model, absent], fallbacks=[{"absent": ["small"]}], num_retries=1)
    answer = router.completion("absent", messages=ASK, temperature=0)
    assert answer.choices[0].message.content.startswith(PARIS)


@check
def a_closed_stream_stops_the_generation() -> None:
    with HERE.stops_a_generation(1500):
        stream = litellm.completion(**GIVEN, **LONG, stream=True)
        next(stream)
        stream.completion_stream.close()


if __name__ == "__main__":
    main()
