"""litellm: chats, completions, tools, structured output, errors, retries, cancellation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import litellm
from cases import ASK, FUNCTIONS, LONG, MESSAGES, PARIS, TOOLS, City, cases
from checks import check, main, raises, server

HERE = server("openvino")
GIVEN = {"model": f"openai/{HERE.model}", "api_base": HERE.openai, "api_key": "none"}
ENDLESS = {"max_tokens": LONG, "ignore_eos": True}
litellm.telemetry = False


def create(**fields: object) -> Any:
    greedy = {"messages": MESSAGES, "temperature": 0, "max_tokens": 300}
    return litellm.completion(**{**GIVEN, **greedy, **fields})


def chat(_: str) -> tuple[str, int]:
    answer = create()
    return answer.choices[0].message.content, answer.usage.completion_tokens


def chat_streamed(_: str) -> Iterator[str]:
    """The last piece has the usage and, as OpenAI's, no choice."""
    pieces = list(create(stream=True, stream_options={"include_usage": True}))
    assert litellm.stream_chunk_builder(pieces).usage.completion_tokens > 2
    return (piece.choices[0].delta.content or "" for piece in pieces if piece.choices)


def completions(prompt: str) -> str:
    own = {**GIVEN, "model": f"text-completion-openai/{HERE.model}"}
    answer = litellm.text_completion(**own, prompt=prompt, temperature=0, max_tokens=4)
    return answer.choices[0].text


def forced_call(_: str) -> tuple[str, dict[str, Any]]:
    """Streamed; the tool's result is taken back."""
    fields = {"tools": TOOLS, "parallel_tool_calls": False, "tool_choice": "required"}
    whole = litellm.stream_chunk_builder(list(create(**fields, stream=True)))
    message = whole.choices[0].message
    (call,) = message.tool_calls
    arguments = json.loads(call.function.arguments)
    result = FUNCTIONS[call.function.name](**arguments)
    messages = [*MESSAGES, message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    assert create(messages=messages, tools=TOOLS, tool_choice="none").choices
    return call.function.name, arguments


def structured_output(_: str) -> City:
    answer = create(response_format=City)
    return City.model_validate_json(answer.choices[0].message.content)


def closed_stream(_: int) -> None:
    stream = create(**ENDLESS, stream=True)
    next(stream)
    stream.completion_stream.close()


cases(
    chat=chat,
    chat_streamed=chat_streamed,
    completions=completions,
    forced_call=forced_call,
    structured_output=structured_output,
    a_closed_stream_stops_the_generation=closed_stream,
)


@check
def as_a_vllm_server() -> None:
    cities = ["Paris", "Rome"]
    model = f"hosted_vllm/{HERE.model}"
    answer = create(model=model, min_p=0.1, top_k=1, guided_choice=cities)
    assert answer.choices[0].message.content == "Paris"


@check
def asyncio_at_once() -> None:
    async def four() -> list:
        asking = (litellm.acompletion(**GIVEN, messages=MESSAGES, temperature=0) for _ in range(4))
        return await asyncio.gather(*asking)

    for answer in asyncio.run(four()):
        assert answer.choices[0].message.content.startswith(PARIS)


@check
def responses_api() -> None:
    answer = litellm.responses(**GIVEN, input=ASK, temperature=0)
    assert "Paris" in answer.output[0].content[0].text


@check
def errors_are_typed() -> None:
    raises(litellm.NotFoundError, lambda: create(model="openai/absent"))
    raises(litellm.BadRequestError, lambda: create(temperature=-1))
    long = [{"role": "user", "content": "a " * 9000}]
    raises(litellm.ContextWindowExceededError, lambda: create(messages=long))
    raises(litellm.Timeout, lambda: create(**ENDLESS, timeout=0.2))


@check
def a_router_falls_back() -> None:
    model = {"model_name": "small", "litellm_params": GIVEN}
    absent = {"model_name": "absent", "litellm_params": GIVEN | {"model": "openai/absent"}}
    router = litellm.Router([model, absent], fallbacks=[{"absent": ["small"]}], num_retries=1)
    answer = router.completion("absent", messages=MESSAGES, temperature=0)
    assert answer.choices[0].message.content.startswith(PARIS)


if __name__ == "__main__":
    main()
