"""Syntax of calls in answers of models, as documented, and the answers of a format."""

# The marks of DeepSeek and Step are written with a wide bar.
# ruff: noqa: RUF001

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Arguments = Mapping[str, Any]
Calls = Sequence[tuple[str, Arguments]]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}},
]
ONE: Calls = [("get_weather", {"city": "São Paulo", "days": 2})]
TWO: Calls = [*ONE, ("get_weather", {"city": 'a "b" <c>'})]
EMPTY: Calls = [("get_time", {})]


@dataclass(frozen=True)
class Format:
    """How a model writes calls and reasoning; `reasoning` is vLLM's name of that parser.

    `special` are marks that its tokenizer has besides those of its texts.
    """

    calls: Callable[[Calls], str]
    reasoning: str = ""
    opening: str = "<think>"
    closing: str = "</think>"
    content: str = "{}"
    special: tuple[str, ...] = ()
    alone: bool = False
    """Whether calls are all of an answer."""
    not_compared: str = ""
    """Why it cannot be."""

    @property
    def prompted(self) -> str:
        """How the prompt ends of an answer without reasoning."""
        return f"{self.opening}{self.closing}" if self.reasoning else ""

    def answers(self) -> dict[str, str]:
        """Answers by what they have."""
        found = {
            "text": self.content.format("Hello, 世界!"),
            "one call": self.calls(ONE),
            "two calls": self.calls(TWO),
            "no arguments": self.calls(EMPTY),
            "cut": self.calls(ONE)[: len(self.calls(ONE)) * 2 // 3],
        }
        if not self.alone:
            found["text and a call"] = self.content.format("Let me see.") + self.calls(ONE)
        if self.reasoning:
            thought = f"{self.opening}Hm, < so\n{self.closing}"
            found["reasoning"] = thought + found["text"]
            found["reasoning and calls"] = thought + found["two calls"]
        return found

    def marks(self) -> list[str]:
        """Marks that are tokens of the model's tokenizer."""
        texts = "".join([*self.answers().values(), self.opening, self.closing])
        return sorted({*_MARK.findall(texts), *self.special})


_MARK = re.compile(
    r"</?[a-z_]*[|｜][^<>\n]{1,40}[|｜]?>|</?(?:think|response|tool_calls?|ifm\|[a-z_]+|"
    r"arg_key|arg_value|tool_sep|seed:[a-z_]+|longcat_tool_call|start_function_call|"
    r"end_function_call|escape|dots_function_call|minimax:tool_call)>|\[/?[A-Z_]+\]"
)


def json_text(arguments: Arguments) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def objects(calls: Calls, key: str = "arguments") -> list[str]:
    return [f'{{"name": "{name}", "{key}": {json_text(given)}}}' for name, given in calls]


def each(begin: str, end: str, calls: Calls, key: str = "arguments") -> str:
    return "\n".join(f"{begin}{made}{end}" for made in objects(calls, key))


def array(begin: str, end: str, calls: Calls, key: str = "arguments") -> str:
    return f"{begin}[{', '.join(objects(calls, key))}]{end}"


def named_array(begin: str, end: str, calls: Calls) -> str:
    return begin + json.dumps([{name: dict(given)} for name, given in calls]) + end


def pythonic(begin: str, end: str, calls: Calls, between: str = ", ", around: str = "[]") -> str:
    made = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
        for name, given in calls
    ]
    return f"{begin}{around[:1]}{between.join(made)}{around[1:]}{end}"


def keys(
    call: str, item: str, calls: Calls, around: tuple[str, str] = ("", ""), between: str = "\n"
) -> str:
    """`call` has the name and its items, `item` a key and its value."""
    return (
        around[0]
        + between.join(
            call.format(name, "".join(item.format(key, value) for key, value in given.items()))
            for name, given in calls
        )
        + around[1]
    )


def dsml(begin: str, end: str, space: str, calls: Calls) -> str:
    mark = f"｜DSML｜{space}"

    def item(key: str, value: Any) -> str:
        text = "true" if isinstance(value, str) else "false"
        return f'<{mark}parameter name="{key}" string="{text}">{value}</{mark}parameter>\n'

    invokes = [
        f'<{mark}invoke name="{name}">\n'
        + "".join(item(key, value) for key, value in given.items())
        + f"</{mark}invoke>\n"
        for name, given in calls
    ]
    return f"<{mark}{begin}>\n{''.join(invokes)}</{mark}{end}>"


def numbered(form: str, around: tuple[str, str], calls: Calls, between: str = "") -> str:
    made = [form.format(name, place, json_text(given)) for place, (name, given) in enumerate(calls)]
    return around[0] + between.join(made) + around[1]


def gemma(calls: Calls) -> str:
    def value(given: Any) -> str:
        return f'<|"|>{given}<|"|>' if isinstance(given, str) else str(given)

    return "".join(
        f"<|tool_call>call:{name}{{"
        + ",".join(f"{key}:{value(each)}" for key, each in given.items())
        + "}<tool_call|>"
        for name, given in calls
    )


def kimi_k3(calls: Calls) -> str:
    def argument(key: str, value: Any) -> str:
        kind = "string" if isinstance(value, str) else "number"
        head = f'<|open|>argument key="{key}" type="{kind}"<|sep|>'
        return f"{head}{value}<|close|>argument<|sep|>"

    made = [
        f'<|open|>call tool="{name}" index="{place + 1}"<|sep|>'
        + "".join(argument(key, value) for key, value in given.items())
        + "<|close|>call<|sep|>"
        for place, (name, given) in enumerate(calls)
    ]
    return f"<|open|>tools<|sep|>{''.join(made)}<|close|>tools<|sep|>"
