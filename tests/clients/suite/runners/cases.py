"""What every client is asked, and what must come of it: a case is a check of each that has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import pydantic
from checks import add, raises, server

ASK = "What is the capital of France?"
PARIS = "The capital of France is Paris"
PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": ASK}]
TASK = "What is the temperature in Paris, in millikelvin, plus 7000? Use the tools."
LONG = 1500
"""Tokens of a generation that is stopped."""
_WEATHER = {"Paris": 288150, "Oslo": 273150, "Bern": 283150}


class City(pydantic.BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]
    large: bool


def temperature(city: str) -> str:
    """Temperature in a city, in millikelvin."""
    return str(_WEATHER.get(city, 293150))


def add_numbers(a: int, b: int) -> str:
    """Sum of two numbers."""
    return str(a + b)


add_numbers.__name__ = "add"
FUNCTIONS = {"temperature": temperature, "add": add_numbers}
_SCHEMAS = {
    "temperature": {"city": {"type": "string"}},
    "add": {"a": {"type": "integer"}, "b": {"type": "integer"}},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": FUNCTIONS[name].__doc__,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": [*properties],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
    for name, properties in _SCHEMAS.items()
]
"""As OpenAI's chats take them."""


def result_in(city: str = "Paris") -> str:
    """What comes of the task."""
    return str(_WEATHER[city] + 7000)


def _chat(ask: Callable[[str], tuple[str, int]]) -> str:
    """The text, and how many tokens the usage has."""
    said, tokens = ask(ASK)
    assert said.startswith(PARIS), said
    assert tokens > 2
    return said


def _chat_streamed(ask: Callable[[str], Iterable[str]]) -> None:
    pieces = [*ask(ASK)]
    assert "".join(pieces).startswith(PARIS), pieces
    assert len(pieces) > 3


def _completions(ask: Callable[[str], str]) -> None:
    said = ask(PROMPT)
    assert said.startswith(" Paris"), said


def _forced_call(ask: Callable[[str], tuple[str, dict[str, Any]]]) -> None:
    """The call's name and arguments: those of the tool."""
    name, arguments = ask(ASK)
    assert arguments.keys() == _SCHEMAS[name].keys(), arguments


def _structured_output(ask: Callable[[str], City]) -> str:
    found = ask(ASK)
    assert isinstance(found, City), found
    return repr(found)


def _an_absent_model(ask: Callable[[str], object]) -> None:
    """The error that the client raises for it has the status, if any, and our text."""
    error = raises(Exception, lambda: ask("absent"))
    assert getattr(error, "status_code", 404) == 404, error
    assert "absent" in str(error)


def _a_prompt_beyond_the_context(ask: Callable[[str], object]) -> None:
    error = raises(Exception, lambda: ask("a " * 9000))
    assert "E1002" in str(error), error


def _a_closed_stream_stops_the_generation(ask: Callable[[int], object]) -> None:
    """It takes a piece, and closes the stream."""
    with server("openvino").stops_a_generation(LONG):
        ask(LONG)


def _agent_loop(
    streamed: bool, ask: Callable[[str, bool], tuple[list[str], str, list[str]]]
) -> str:
    """Tools that were called, what is said in the end, and the pieces of it in a stream."""
    called, said, pieces = ask(TASK, streamed)
    assert called == [*FUNCTIONS]
    assert result_in() in said
    if streamed:
        assert "".join(pieces).endswith(said), pieces
        assert len(pieces) > 2
    return said


CASES: dict[str, Callable[[Any], object]] = {
    "chat": _chat,
    "chat_streamed": _chat_streamed,
    "completions": _completions,
    "forced_call": _forced_call,
    "structured_output": _structured_output,
    "an_absent_model": _an_absent_model,
    "a_prompt_beyond_the_context": _a_prompt_beyond_the_context,
    "a_closed_stream_stops_the_generation": _a_closed_stream_stops_the_generation,
    "agent_loop": partial(_agent_loop, False),
    "agent_loop_streamed": partial(_agent_loop, True),
}


def cases(by: str = "", **asks: Callable[..., Any]) -> None:
    """Add the cases of these names; each value asks the client, by the API that `by` names."""
    if "agent_loop" in asks:
        asks["agent_loop_streamed"] = asks["agent_loop"]
    for name, ask in asks.items():
        words = name.replace("_", " ")
        add(f"{words} by {by}" if by else words, partial(CASES[name], ask))
