"""openai: chats, completions, structured output, responses; with tools, errors and cancellation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
from cases import ASK, FUNCTIONS, LONG, MESSAGES, PARIS, TOOLS, City, cases
from checks import Server, check, main, raises, server
from openai import types
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params

HERE, MOCK = server("openvino"), server("mock")
RESPONSE = {"model": HERE.model, "input": ASK, "temperature": 0, "store": False}


def client(one: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=one.openai, api_key="none", max_retries=0, timeout=120)


CLIENT = client(HERE)


def given(one: Server = HERE, **fields: object) -> dict[str, Any]:
    return {
        "model": one.model,
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 300,
        **fields,
    }


def create(**fields: object) -> Any:
    return CLIENT.chat.completions.create(**given(**fields))


def chat(prompt: str) -> tuple[str, int]:
    answer = create(messages=[{"role": "user", "content": prompt}])
    return answer.choices[0].message.content, answer.usage.completion_tokens


def chat_streamed(_: str) -> Iterator[str]:
    with CLIENT.chat.completions.stream(**given(stream_options={"include_usage": True})) as stream:
        yield from (event.delta for event in stream if event.type == "content.delta")
        assert stream.get_final_completion().usage.completion_tokens > 2


def completions(prompt: str) -> str:
    fields = {"model": HERE.model, "prompt": prompt, "temperature": 0, "max_tokens": 4}
    whole = CLIENT.completions.create(**fields).choices[0].text
    pieces = CLIENT.completions.create(**fields, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == whole
    return whole


def calls(**fields: object) -> list[Any]:
    return create(tools=TOOLS, **fields).choices[0].message.tool_calls or []


def forced_call(_: str) -> tuple[str, dict[str, Any]]:
    """Whole and streamed: both are equal."""
    (call,) = calls(tool_choice="required", parallel_tool_calls=False)
    fields = given(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    with CLIENT.chat.completions.stream(**fields) as stream:
        (joined,) = stream.get_final_completion().choices[0].message.tool_calls
    assert joined.function.arguments == call.function.arguments
    return call.function.name, json.loads(call.function.arguments)


def structured_output(_: str) -> City:
    fields = given(response_format=City)
    return CLIENT.chat.completions.parse(**fields).choices[0].message.parsed


def closed_stream(tokens: int) -> None:
    with create(max_tokens=tokens, stream=True, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))


def loop(task: str, streamed: bool) -> tuple[list[str], str, list[str]]:
    one = server("scripted")
    chats = client(one).chat.completions
    messages: list[Any] = [{"role": "user", "content": task}]
    called, pieces = [], []
    while True:
        fields = given(one, messages=messages, tools=TOOLS)
        if streamed:
            with chats.stream(**fields) as stream:
                pieces = [event.delta for event in stream if event.type == "content.delta"]
                message = stream.get_final_completion().choices[0].message
        else:
            message = chats.create(**fields).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return called, message.content, pieces
        for call in message.tool_calls:
            called.append(call.function.name)
            said = FUNCTIONS[called[-1]](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})


cases(
    chat=chat,
    chat_streamed=chat_streamed,
    completions=completions,
    forced_call=forced_call,
    structured_output=structured_output,
    agent_loop=loop,
    a_prompt_beyond_the_context=chat,
    a_closed_stream_stops_the_generation=closed_stream,
)


@check
def the_server_knows_its_fields() -> None:
    HERE.knows("chat", completion_create_params.CompletionCreateParamsBase)
    HERE.knows("completions", types.completion_create_params.CompletionCreateParamsBase)
    HERE.knows("embeddings", types.EmbeddingCreateParams)
    HERE.knows("responses", response_create_params.ResponseCreateParamsBase)


@check
def lists_of_prompts_and_n() -> None:
    prompts = ["The capital of France is", "The capital of Italy is"]
    answer = CLIENT.completions.create(
        model=HERE.model, prompt=prompts, n=2, temperature=0, max_tokens=1
    )
    assert [choice.text for choice in answer.choices] == [" Paris"] * 2 + [" Rome"] * 2
    answer = create(n=3, seed=7, temperature=2, max_tokens=8)
    assert len({choice.message.content for choice in answer.choices}) > 1


@check
def logprobs_and_echo() -> None:
    answer = create(max_tokens=4, logprobs=True)
    assert [token.logprob <= 0 for token in answer.choices[0].logprobs.content] == [True] * 4
    answer = CLIENT.completions.create(
        model=HERE.model, prompt="One two three", max_tokens=0, echo=True, logprobs=0
    )
    assert answer.choices[0].text == "One two three"
    assert answer.choices[0].logprobs.token_logprobs[0] is None


@check
def named_tool_and_none() -> None:
    (named,) = calls(tool_choice={"type": "function", "function": {"name": "add"}})
    assert named.function.name == "add"
    assert calls(tool_choice="none") == []


@check
def responses_api() -> None:
    answer = CLIENT.responses.create(**RESPONSE)
    assert answer.output_text.startswith(PARIS)
    with CLIENT.responses.stream(**RESPONSE) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == answer.output_text
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert isinstance(CLIENT.responses.parse(**RESPONSE, text_format=City).output_parsed, City)


@check
def async_streams_at_once() -> None:
    async def one(own: openai.AsyncOpenAI) -> str:
        stream = await own.chat.completions.create(**given(stream=True))
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def eight() -> list[str]:
        async with openai.AsyncOpenAI(base_url=HERE.openai, api_key="none") as own:
            return await asyncio.gather(*(one(own) for _ in range(8)))

    assert all(text.startswith(PARIS) for text in asyncio.run(eight()))


@check
def models_and_raw_responses() -> None:
    assert CLIENT.models.retrieve(HERE.model).id == HERE.model
    raw = CLIENT.chat.completions.with_raw_response.create(
        **given(max_tokens=2, metadata={"a": "b"}, store=False, user="me")
    )
    assert raw.headers["x-request-id"] == raw.parse().id


@check
def errors_are_typed() -> None:
    missing = raises(openai.NotFoundError, lambda: create(model="gpt-4o"))
    assert (missing.param, missing.code) == ("model", "model_not_found")
    assert raises(openai.BadRequestError, lambda: create(temperature=-1)).code == "E1005"
    raises(openai.NotFoundError, lambda: CLIENT.files.list())


@check
def a_timeout_stops_the_generation() -> None:
    hasty = CLIENT.with_options(timeout=0.5).chat.completions
    fields = given(max_tokens=LONG, extra_body={"ignore_eos": True})
    with HERE.stops_a_generation(LONG):
        raises(openai.APITimeoutError, lambda: hasty.create(**fields))


@check
def a_full_server_is_retried() -> None:
    """429 with Retry-After, which the client waits for."""
    chats = client(MOCK).chat.completions
    fields = {"model": MOCK.model, "messages": MESSAGES}
    for_a_second = [chats.create(**fields, max_tokens=100, stream=True) for _ in range(MOCK.places)]
    refused = raises(openai.RateLimitError, lambda: chats.create(**fields, max_tokens=1))
    assert refused.code == "rate_limit_exceeded"
    assert refused.response.headers["retry-after"]
    patient = client(MOCK).with_options(max_retries=8)
    assert patient.chat.completions.create(**fields, max_tokens=1).choices
    for stream in for_a_second:
        stream.close()


if __name__ == "__main__":
    main()
