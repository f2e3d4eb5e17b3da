"""langchain-openai: chats, streams, batches, errors; with tools and structured output."""

from __future__ import annotations

import asyncio

import checks_langchain_openai_tools
import openai
from checks import check, main, raises
from langchain_client import ASK, CHAT, GIVEN, HERE, PARIS, TOOLS
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

__all__ = ["checks_langchain_openai_tools"]


@check
def invoke() -> None:
    answer = CHAT.invoke([SystemMessage("You are helpful."), HumanMessage(ASK)])
    assert "Paris" in answer.content
    assert answer.usage_metadata["output_tokens"] > 2
    assert answer.response_metadata["finish_reason"] == "stop"


@check
def stream() -> None:
    pieces = list(CHAT.stream(ASK, stream_usage=True))
    whole = sum(pieces[1:], pieces[0])
    assert whole.content.startswith(PARIS)
    assert whole.usage_metadata["output_tokens"] > 2
    assert len(pieces) > 3


@check
def batch() -> None:
    answers = CHAT.batch([ASK, "What is the capital of Italy?"])
    assert all(word in found.content for word, found in zip(("Paris", "Rom"), answers, strict=True))


@check
def asyncio_stream_and_events() -> None:
    async def ask() -> tuple[str, set[str]]:
        text = "".join([piece.content async for piece in CHAT.astream(ASK)])
        return text, {event["event"] async for event in CHAT.astream_events(ASK, version="v2")}

    text, kinds = asyncio.run(ask())
    assert text.startswith(PARIS)
    assert "on_chat_model_stream" in kinds


@check
def completions_in_batches() -> None:
    model = OpenAI(**GIVEN, max_tokens=4)
    assert model.invoke("The capital of France is").startswith(" Paris")
    found = model.generate(["The capital of France is", "The capital of Italy is"])
    assert [one[0].text[:5] for one in found.generations] == [" Pari", " Rome"]
    assert "".join(model.stream("The capital of France is")).startswith(" Paris")


@check
def logprobs_and_n() -> None:
    model = ChatOpenAI(**GIVEN | {"temperature": 1}, n=2, logprobs=True, max_tokens=4, seed=3)
    found = model.generate([[HumanMessage(ASK)]]).generations[0]
    assert len(found) == 2
    assert len(found[0].message.response_metadata["logprobs"]["content"]) == 4


@check
def responses_api() -> None:
    model = ChatOpenAI(**GIVEN, use_responses_api=True, store=False, max_tokens=300)
    assert PARIS in model.invoke(ASK).text
    pieces = list(model.stream(ASK))
    assert PARIS in sum(pieces[1:], pieces[0]).text
    bound = model.bind_tools(TOOLS, tool_choice="required")
    assert bound.invoke(ASK).tool_calls


@check
def errors_are_openais() -> None:
    absent = ChatOpenAI(**GIVEN | {"model": "absent"}, max_retries=0)
    raises(openai.NotFoundError, lambda: absent.invoke(ASK))
    error = raises(openai.BadRequestError, lambda: CHAT.invoke("a " * 9000))
    assert "E1002" in str(error)


@check
def a_closed_stream_stops_the_generation() -> None:
    with HERE.stops_a_generation(1500):
        pieces = CHAT.stream(ASK, max_tokens=1500, extra_body={"ignore_eos": True})
        next(pieces)
        pieces.close()


if __name__ == "__main__":
    main()
