"""Two tools and a task, for agent loops; and a call that names one."""

from __future__ import annotations

from typing import Any

TASK = "What is the temperature in Paris, in millikelvin, plus 7000? Use the tools."
_WEATHER = {"Paris": 288150, "Oslo": 273150, "Bern": 283150}


def temperature(city: str) -> str:
    """Temperature in a city, in millikelvin."""
    return str(_WEATHER.get(city, 293150))


def add(a: int, b: int) -> str:
    """Sum of two numbers."""
    return str(a + b)


def call(name: str, arguments: dict[str, Any]) -> str:
    """What the tool says; the arguments must be its own."""
    return {"temperature": temperature, "add": add}[name](**arguments)


def _function(name: str, what: str, **properties: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": [*properties],
        "additionalProperties": False,
    }
    function = {"name": name, "description": what, "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


TOOLS = [
    _function("temperature", str(temperature.__doc__), city="string"),
    _function("add", str(add.__doc__), a="integer", b="integer"),
]
"""As OpenAI's chats take them."""


def task(city: str) -> str:
    """The task, of another city."""
    return TASK.replace("Paris", city)


def result(city: str = "Paris") -> str:
    """What comes of the task."""
    return add(int(temperature(city)), 7000)
