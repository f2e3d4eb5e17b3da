"""What the scripted mock says to agents: calls of `agent_tools`, one after another, and an end.

A coding agent calls its own tools: it reads a file, and writes another.
"""

from __future__ import annotations

import json
from pathlib import Path

_TEMPERATURES = {"Paris": 288150, "Oslo": 273150, "Bern": 283150}
_PLUS = 7000


def _call(name: str, **arguments: object) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def _fields(**values: object) -> str:
    """DSPy's own format, which it asks for in its prompts."""
    return "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in values.items())


def _thought(name: str, **arguments: object) -> str:
    return _fields(
        next_thought="Next.",
        next_tool_name=name,
        next_tool_args=json.dumps(arguments),
        completed="",
    )


def _loop(city: str, call: object, end: str) -> list[dict[str, str]]:
    first = _TEMPERATURES[city]
    assert callable(call)
    return [
        {"after": f"What is the temperature in {city}", "say": call("temperature", city=city)},
        {"after": str(first), "say": call("add", a=first, b=_PLUS)},
        {"after": str(first + _PLUS), "say": end},
    ]


def script(directory: Path) -> list[dict[str, str]]:
    """An answer for whoever has one of these texts last in the prompt (docs/mock.md).

    `directory` has the coding agent's files.
    """
    notes, copy = str(directory / "notes.txt"), str(directory / "copy.txt")
    return [
        *_loop("Paris", _call, "It is 295150."),
        *_loop("Oslo", _call, _call("final_answer", answer="It is 280150.")),  # smolagents
        *_loop("Bern", _thought, _thought("finish")),  # dspy
        {
            "after": "starting with the field `[[ ## reasoning ## ]]`",
            "say": _fields(reasoning="Added.", answer="It is 290150.", completed=""),
        },
        {"after": "Which number is in notes.txt", "say": _call("Read", file_path=notes)},
        {"after": "number 640917", "say": _call("Write", file_path=copy, content="It is 640918.")},
        {"after": "It is 640918.", "say": "Written: 640918."},
    ]
