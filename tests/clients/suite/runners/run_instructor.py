"""instructor: typed answers in each of its modes, lists, parts of an answer, retries."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import instructor
import openai
import pydantic
from cases import City, cases
from checks import add, check, main, raises, server
from instructor import Mode
from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException

HERE = server("openvino")
PLAIN = openai.OpenAI(base_url=HERE.openai, api_key="none", max_retries=0, timeout=120)
MESSAGES = [{"role": "user", "content": "Tell me about Paris, the capital of France."}]
GIVEN = {"model": HERE.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 300}
UNGUIDED = (InstructorRetryException, IncompleteOutputException)
"""A small model may miss a schema that is only in the prompt."""


def ask(mode: Mode, _: str = "", **fields: object) -> object:
    client = instructor.from_openai(PLAIN, mode=mode)
    return client.create(**{**GIVEN, "response_model": City, "max_retries": 0, **fields})


def responses(_: str) -> object:
    client = instructor.from_openai(PLAIN, mode=Mode.RESPONSES_TOOLS)
    return client.responses.create(
        model=HERE.model, input=MESSAGES, response_model=City, max_output_tokens=300
    )


for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA):
    cases(f"mode {mode.value}".replace("_", " "), structured_output=partial(ask, mode))
cases("mode responses tools", structured_output=responses)


def unguided(mode: Mode) -> str:
    try:
        return repr(ask(mode))
    except UNGUIDED as error:
        if any(word in str(error) for word in ("validation error", "JSON", "length")):
            return "not what the schema says"
        raise


add("mode json", partial(unguided, Mode.JSON))
add("mode markdown json", partial(unguided, Mode.MD_JSON))


@check
def parts_of_an_answer_streamed() -> None:
    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
        client = instructor.from_openai(PLAIN, mode=mode)
        parts = list(client.create_partial(**GIVEN, response_model=City))
        assert City.model_validate(parts[-1].model_dump())
        assert mode is Mode.TOOLS or len(parts) > 2


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
def errors_are_openais() -> None:
    error = raises(InstructorRetryException, lambda: ask(Mode.TOOLS, model="absent"))
    assert "404" in str(error)


if __name__ == "__main__":
    main()
