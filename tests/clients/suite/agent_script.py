"""What the scripted mock says to agents: calls of the tools in `cases`, then an end.

Coding agents call their own tools.
"""

from __future__ import annotations

import json
from collections.abc import Callable

_TEMPERATURES = {"Paris": 288150, "Oslo": 273150, "Bern": 283150}
_PLUS = 7000
_COMPLY = ("Say hello", "What is my name", "Count from 1", "Say one word", "only the number")
"""What llm-comply asks, but for a call."""


def _call(name: str, **arguments: object) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def _fields(**values: object) -> str:
    """DSPy's own format, which it asks for in its prompts."""
    return "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in values.items())


def _thought(name: str, **arguments: object) -> str:
    fields = {"next_thought": "Next.", "next_tool_name": name, "completed": ""}
    return _fields(**fields, next_tool_args=json.dumps(arguments))


def _loop(city: str, call: Callable[..., str], end: str) -> list[dict[str, str]]:
    first = _TEMPERATURES[city]
    return [
        {"after": f"What is the temperature in {city}", "say": call("temperature", city=city)},
        {"after": str(first), "say": call("add", a=first, b=_PLUS)},
        {"after": str(first + _PLUS), "say": end},
    ]


def _coding(
    mark: str,
    read: Callable[[str], str],
    edit: Callable[[str, str], str],
    shell: Callable[[str], str],
) -> list[dict[str, str]]:
    """A coding agent's task, by its own tools, and answers with a fault (`coding_agent.py`)."""
    says = {
        "TASK": "I will read both files.\n" + read("alpha.txt"),
        "alpha-731": read("beta.txt"),
        "beta-284": edit(f"{mark}-beta-284", f"{mark}-gamma-555"),
        "gamma-555": shell(f"echo {mark}-$((400+66))"),
        "466": f"{mark} is done.",
        "LONG-CALL": shell("z" * 2000),
        "MALFORMED": shell("x@y").replace("@", "\n").replace("}}", "}"),
        "LONG-TEXT": " ".join(map(str, range(600))),
    }
    return [{"after": f"{mark}-{key}", "say": say} for key, say in says.items()]


def script() -> list[dict[str, str]]:
    """An answer for whoever has one of these texts last in the prompt (docs/mock.md)."""
    return [
        *_loop("Paris", _call, "It is 295150."),
        *_loop("Oslo", _call, _call("final_answer", answer="It is 280150.")),  # smolagents
        *_loop("Bern", _thought, _thought("finish")),  # dspy
        {
            "after": "starting with the field `[[ ## reasoning ## ]]`",
            "say": _fields(reasoning="Added.", answer="It is 290150.", completed=""),
        },
        *({"after": ask, "say": "Hello."} for ask in _COMPLY),
        {"after": "weather in San Francisco?", "say": '[{"name": "get_weather", "arguments": {}}]'},
        *_coding(
            "CC",
            lambda path: _call("Read", file_path=path),
            lambda old, new: _call("Edit", file_path="beta.txt", old_string=old, new_string=new),
            lambda line: _call("Bash", command=line, description="A line"),
        ),
        *_coding(
            "CX",
            lambda path: _call("exec_command", cmd=f"cat {path}"),
            lambda old, new: _call("exec_command", cmd=f"sed -i s/{old}/{new}/ beta.txt"),
            lambda line: _call("exec_command", cmd=line),
        ),
        {"after": "CX-AGENT", "say": _call("multi_agent_v1__close_agent", target="absent")},
        {"after": "invalid agent id absent", "say": "No such agent."},
    ]
