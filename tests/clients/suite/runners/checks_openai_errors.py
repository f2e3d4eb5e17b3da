"""openai: typed errors, retries, and what stops a generation."""

from __future__ import annotations

import openai
from checks import check, raises, server
from openai_client import ASK, CLIENT, HERE, MODEL

LONG = [{"role": "user", "content": "Write a long story about the sea."}]


@check
def errors_are_typed() -> None:
    def ask(**fields: object) -> object:
        return CLIENT.chat.completions.create(
            **{"model": MODEL, "messages": ASK, "max_tokens": 2, **fields}
        )

    missing = raises(openai.NotFoundError, lambda: ask(model="gpt-4o"))
    assert (missing.param, missing.code) == ("model", "model_not_found")
    refused = raises(openai.BadRequestError, lambda: ask(temperature=-1))
    assert refused.code == "E1005"
    raises(openai.NotFoundError, lambda: CLIENT.files.list())
    long = raises(openai.BadRequestError, lambda: ask(messages=[ASK[0] | {"content": "a " * 9000}]))
    assert long.body["code"] == "context_length_exceeded", long.body


@check
def a_closed_stream_stops_the_generation() -> None:
    with (
        HERE.stops_a_generation(1500),
        CLIENT.chat.completions.create(
            model=MODEL,
            messages=LONG,
            max_tokens=1500,
            stream=True,
            extra_body={"ignore_eos": True},
        ) as stream,
    ):
        next(iter(stream))


@check
def a_timeout_stops_the_generation() -> None:
    with HERE.stops_a_generation(1500):
        hasty = CLIENT.with_options(timeout=0.5)
        given = {"model": MODEL, "messages": LONG, "max_tokens": 1500}
        raises(
            openai.APITimeoutError,
            lambda: hasty.chat.completions.create(**given, extra_body={"ignore_eos": True}),
        )


@check
def a_full_server_is_retried() -> None:
    """429 with Retry-After, which the client waits for."""
    mock = server("mock")
    client = openai.OpenAI(base_url=mock.openai, api_key="none", max_retries=0)
    given = {"model": mock.model, "messages": ASK}
    for_a_second = [
        client.chat.completions.create(**given, max_tokens=100, stream=True)
        for _ in range(mock.places)
    ]
    refused = raises(
        openai.RateLimitError, lambda: client.chat.completions.create(**given, max_tokens=1)
    )
    assert refused.code == "rate_limit_exceeded"
    assert refused.response.headers["retry-after"]
    patient = client.with_options(max_retries=8)
    assert patient.chat.completions.create(**given, max_tokens=1).choices
    for stream in for_a_second:
        stream.close()
