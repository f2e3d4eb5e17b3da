"""openai: chats, completions, structured output, responses; with tools, errors and cancellation."""

from __future__ import annotations

import asyncio
from typing import Literal

import checks_openai_errors
import checks_openai_tools
import openai
import pydantic
from checks import check, main, server
from openai import types
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params
from openai_client import ASK, CLIENT, HERE, MODEL, PARIS

__all__ = ["checks_openai_errors", "checks_openai_tools"]


@check
def chat() -> str:
    answer = CLIENT.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=32)
    assert answer.choices[0].message.content.startswith(PARIS)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    HERE.knows("chat", completion_create_params.CompletionCreateParamsBase)
    HERE.knows("completions", types.completion_create_params.CompletionCreateParamsBase)
    HERE.knows("embeddings", types.EmbeddingCreateParams)
    HERE.knows("responses", response_create_params.ResponseCreateParamsBase)
    return answer.choices[0].message.content


@check
def chat_streamed() -> None:
    with CLIENT.chat.completions.stream(
        model=MODEL, messages=ASK, temperature=0, stream_options={"include_usage": True}
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("content.delta") > 2
    assert final.choices[0].message.content.startswith(PARIS)
    assert final.usage.completion_tokens > 2


@check
def completions() -> None:
    given = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0}
    whole = CLIENT.completions.create(**given, max_tokens=4).choices[0].text
    assert whole.startswith(" Paris")
    pieces = CLIENT.completions.create(**given, max_tokens=4, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == whole


@check
def lists_of_prompts_and_n() -> None:
    prompts = ["The capital of France is", "The capital of Italy is"]
    answer = CLIENT.completions.create(
        model=MODEL, prompt=prompts, n=2, temperature=0, max_tokens=1
    )
    assert [choice.text for choice in answer.choices] == [" Paris"] * 2 + [" Rome"] * 2
    answer = CLIENT.chat.completions.create(
        model=MODEL, messages=ASK, n=3, seed=7, temperature=2, max_tokens=8
    )
    assert len({choice.message.content for choice in answer.choices}) > 1


@check
def logprobs_and_echo() -> None:
    answer = CLIENT.chat.completions.create(model=MODEL, messages=ASK, max_tokens=4, logprobs=True)
    assert [token.logprob <= 0 for token in answer.choices[0].logprobs.content] == [True] * 4
    answer = CLIENT.completions.create(
        model=MODEL, prompt="One two three", max_tokens=0, echo=True, logprobs=0
    )
    assert answer.choices[0].text == "One two three"
    assert answer.choices[0].logprobs.token_logprobs[0] is None


@check
def top_logprobs_with_the_mock() -> None:
    mock = server("mock")
    client = openai.OpenAI(base_url=mock.openai, api_key="none")
    answer = client.chat.completions.create(
        model=mock.model, messages=ASK, max_tokens=2, logprobs=True, top_logprobs=2
    )
    assert all(token.top_logprobs for token in answer.choices[0].logprobs.content)


class City(pydantic.BaseModel):
    name: str
    country: Literal["France", "Italy"]
    population: int


@check
def structured_output() -> str:
    answer = CLIENT.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=City, temperature=0, max_tokens=100
    )
    assert isinstance(answer.choices[0].message.parsed, City)
    return repr(answer.choices[0].message.parsed)


@check
def responses_api() -> None:
    given = {"model": MODEL, "input": "What is the capital of France?", "temperature": 0}
    answer = CLIENT.responses.create(**given, store=False)
    assert answer.output_text.startswith(PARIS)
    with CLIENT.responses.stream(**given, store=False) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == answer.output_text
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    parsed = CLIENT.responses.parse(**given, text_format=City, store=False)
    assert isinstance(parsed.output_parsed, City)


@check
def async_streams_at_once() -> None:
    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=ASK, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def eight() -> list[str]:
        async with openai.AsyncOpenAI(base_url=HERE.openai, api_key="none") as client:
            return await asyncio.gather(*(one(client) for _ in range(8)))

    assert all(text.startswith(PARIS) for text in asyncio.run(eight()))


@check
def models_and_raw_responses() -> None:
    assert CLIENT.models.retrieve(MODEL).id == MODEL
    raw = CLIENT.chat.completions.with_raw_response.create(
        model=MODEL, messages=ASK, max_tokens=2, metadata={"a": "b"}, store=False, user="me"
    )
    assert raw.headers["x-request-id"] == raw.parse().id


if __name__ == "__main__":
    main()
