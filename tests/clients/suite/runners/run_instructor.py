"""instructor: typed answers in each of its modes, lists, parts of an answer, retries."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Annotated, Literal

import instructor
import openai
import pydantic
from checks import check, main, raises, server
from instructor import Mode
from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException

HERE = server("openvino")
PLAIN = openai.OpenAI(base_url=HERE.openai, api_key="none", max_retries=0, timeout=120)
TYPED = instructor.from_openai(PLAIN)
MESSAGES = [{"role": "user", "content": "Tell me about Paris, the capital of France."}]
GIVEN = {"model": HERE.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 300}


class City(pydantic.BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]
    country: Literal["France", "Italy"]
    large: bool


def ask(mode: Mode, **fields: object) -> object:
    client = instructor.from_openai(PLAIN, mode=mode)
    given = {"response_model": City, "max_retries": 0}
    return client.create(**{**GIVEN, **given, **fields})


@check
def its_default_mode() -> str:
    found = TYPED.chat.completions.create(**GIVEN, response_model=City)
    assert isinstance(found, City)
    return repr(found)


@check
def mode_tools() -> None:
    assert isinstance(ask(Mode.TOOLS), City)


@check
def mode_tools_strict() -> None:
    assert isinstance(ask(Mode.TOOLS_STRICT), City)


@check
def mode_json_schema() -> None:
    assert isinstance(ask(Mode.JSON_SCHEMA), City)


def ask_without_a_guide(mode: Mode) -> str:
    """A small model may miss a schema that is in the prompt alone."""
    try:
        return repr(ask(mode))
    except (InstructorRetryException, IncompleteOutputException) as error:
        if "validation error" in str(error) or "JSON" in str(error) or "length" in str(error):
            return "not what the schema says"
        raise


@check
def mode_json() -> str:
    return ask_without_a_guide(Mode.JSON)


@check
def mode_markdown_json() -> str:
    return ask_without_a_guide(Mode.MD_JSON)


@check
def mode_responses_tools() -> None:
    client = instructor.from_openai(PLAIN, mode=Mode.RESPONSES_TOOLS)
    found = client.responses.create(
        model=HERE.model, input=MESSAGES, response_model=City, max_output_tokens=300
    )
    assert isinstance(found, City)


@check
def parallel_tools() -> None:
    class Weather(pydantic.BaseModel):
        city: str

    client = instructor.from_openai(PLAIN, mode=Mode.PARALLEL_TOOLS)
    try:
        found = list(client.create(**GIVEN, response_model=Iterable[Weather]))
    except (InstructorRetryException, IncompleteOutputException):
        return  # it sends tool_choice auto: the model decides
    assert all(isinstance(one, Weather) for one in found)


@check
def lists() -> None:
    found = list(TYPED.create_iterable(**GIVEN, response_model=City))
    assert all(isinstance(one, City) for one in found)


@check
def parts_of_an_answer_streamed() -> None:
    parts = list(TYPED.create_partial(**GIVEN, response_model=City))
    assert City.model_validate(parts[-1].model_dump())
    client = instructor.from_openai(PLAIN, mode=Mode.JSON_SCHEMA)
    assert len(list(client.create_partial(**GIVEN, response_model=City))) > 2


@check
def a_validator_asks_again() -> None:
    asked = []

    def small(value: int) -> int:
        asked.append(value)
        if len(asked) < 2:
            raise ValueError("say it again")
        return value

    class Size(pydantic.BaseModel):
        size: Annotated[int, pydantic.AfterValidator(small)]

    found = ask(Mode.TOOLS, response_model=Size, max_retries=2)
    assert found.size == asked[-1]
    assert len(asked) == 2


@check
def asyncio_client() -> None:
    async def one() -> object:
        async with openai.AsyncOpenAI(base_url=HERE.openai, api_key="none") as plain:
            return await instructor.from_openai(plain).create(**GIVEN, response_model=City)

    assert isinstance(asyncio.run(one()), City)


@check
def errors_are_openais() -> None:
    error = raises(InstructorRetryException, lambda: ask(Mode.TOOLS, model="absent"))
    assert "404" in str(error)


if __name__ == "__main__":
    main()
