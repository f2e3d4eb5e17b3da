"""Formats of vLLM's parsers: how a model writes calls and reasoning, as documented."""

# The marks of DeepSeek and Step are written with a wide bar.
# ruff: noqa: RUF001

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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


_GLM = "<tool_call>{0}\n{1}</tool_call>", "<arg_key>{0}</arg_key>\n<arg_value>{1}</arg_value>\n"
_INVOKE = '<invoke name="{0}">\n{1}</invoke>', '<parameter name="{0}">{1}</parameter>\n'
_V3 = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_KIMI = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_PLAMO = (
    "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{0}"
    "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json"
    "<|plamo:msg|>{2}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
)
_STEP3 = (
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{0}">{1}</steptml:invoke>'
    "<｜tool_call_end｜>",
    '<steptml:parameter name="{0}">{1}</steptml:parameter>',
)
_HERMES = partial(each, "<tool_call>\n", "\n</tool_call>")
_FUNCTION = "<function={0}>\n{1}</function>", "<parameter={0}>\n{1}\n</parameter>\n"
_QWEN = partial(keys, f"<tool_call>\n{_FUNCTION[0]}\n</tool_call>", _FUNCTION[1])
_ATEM = partial(
    keys,
    "<|start|>assistant to={0}<|message|><atem:function_calls>\n"
    '<atem:invoke name="{0}">\n{1}</atem:invoke>\n</atem:function_calls><|eom|>',
    '<atem:parameter name="{0}">{1}</atem:parameter>\n',
    between="",
)
_MUSE = {
    "content": "<|start|>assistant to=user<|message|>{}<|eom|>",
    "opening": "<|start|>assistant to=self<|message|>",
    "closing": "<|eom|>",
    "special": ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
}
_FIELDS: dict[str, Any] = {
    "thinking": {"open": "<think>", "close": "</think>"},
    "content": {},
    "tool_calls": {
        "open": "<tool_call>",
        "close": "</tool_call>",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    },
}
RESPONSE_TEMPLATE: dict[str, Any] = {
    "version": 1,
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": _FIELDS,
}
"""What the tokenizer of a model says of its answers, for the parser `hf`."""

FORMATS: dict[str, Format] = {
    "apertus": Format(partial(named_array, "<|tools_prefix|>", "<|tools_suffix|>")),
    "beam": Format(_HERMES, "beam"),
    "cohere_command3": Format(partial(array, "<|START_ACTION|>", "<|END_ACTION|>")),
    "cohere_command4": Format(partial(array, "<|START_ACTION|>", "<|END_ACTION|>")),
    "deepseek_v3": Format(
        partial(
            numbered,
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{0}\n```json\n{2}\n```<｜tool▁call▁end｜>",
            _V3,
            between="\n",
        ),
        "deepseek_r1",
    ),
    "deepseek_v31": Format(
        partial(numbered, "<｜tool▁call▁begin｜>{0}<｜tool▁sep｜>{2}<｜tool▁call▁end｜>", _V3),
        "deepseek_v3",
        special=("<think>", "</think>"),
    ),
    "deepseek_v32": Format(partial(dsml, "function_calls", "function_calls", ""), "deepseek_v3"),
    "deepseek_v4": Format(partial(dsml, "tool_calls", "tool_calls", ""), "deepseek_v4"),
    "deepseek_v41": Format(partial(dsml, "calls", "calls", " "), "deepseek_v41"),
    "dots": Format(
        partial(keys, *_INVOKE, around=("<dots_function_call>\n", "\n</dots_function_call>"))
    ),
    "ernie45": Format(_HERMES, "ernie45", special=("<response>", "</response>", "<0x0A>")),
    "functiongemma": Format(
        partial(
            keys,
            "<start_function_call>call:{0}{{{1}}}<end_function_call>",
            "{0}:<escape>{1}<escape>",
            between="",
        )
    ),
    "gemma4": Format(gemma, "gemma4", "<|channel>thought\n", "<channel|>"),
    "gigachat3": Format(
        lambda calls: f"<|function_call|>{objects(calls)[0]}", special=("<|message_sep|>",)
    ),
    "glm45": Format(partial(keys, *_GLM), "glm45"),
    "glm47": Format(partial(keys, *_GLM), "glm47"),
    "granite": Format(partial(array, "<|tool_call|>", ""), "granite_thinking_parser"),
    "granite-20b-fc": Format(
        lambda calls: "".join(f"<function_call> {each}\n" for each in objects(calls)), alone=True
    ),
    "granite4": Format(_HERMES),
    "hermes": Format(_HERMES, "qwen3"),
    "hf": Format(_HERMES, "hf"),
    # Its reasoning parser has the ids of its own tokenizer.
    "hunyuan_a13b": Format(partial(array, "<tool_calls>", "</tool_calls>")),
    "hy_v3": Format(
        partial(
            keys,
            "<tool_call>{0}<tool_sep>{1}</tool_call>",
            "<arg_key>{0}</arg_key>\n<arg_value>{1}</arg_value>\n",
            around=("<tool_calls>", "</tool_calls>"),
        ),
        "hy_v3",
    ),
    "hy_v4": Format(
        partial(
            keys,
            "<tool_call>{0}{1}</tool_call>",
            "<arg_key>{0}</arg_key><arg_value>{1}</arg_value>",
            around=("<tool_calls>", "</tool_calls>"),
            between="",
        ),
        "hy_v4",
    ),
    "inkling": Format(
        lambda calls: "".join(
            f'<|message_model|>{name}<|content_invoke_tool_json|>{{"name": "{name}", "args":'
            f" {json_text(given)}}}<|end_message|>"
            for name, given in calls
        ),
        "inkling",
        "<|message_model|><|content_thinking|>",
        "<|end_message|>",
        "<|message_model|><|content_text|>{}<|end_message|>",
        (
            "<|content_invoke_tool_text|>",
            "<|content_tool_error|>",
            "<|content_model_end_sampling|>",
        ),
    ),
    "internlm": Format(
        lambda calls: f"<|action_start|><|plugin|>\n{objects(calls, 'parameters')[0]}<|action_end|>"
    ),
    "jamba": Format(partial(array, "<tool_calls>", "</tool_calls>")),
    "k2_horizon": Format(
        partial(
            keys,
            "<ifm|tool_call>{0}\n{1}</ifm|tool_call>",
            "<ifm|arg_key>{0}</ifm|arg_key>\n<ifm|arg_value>{1}</ifm|arg_value>\n",
            around=("<ifm|tool_calls>\n", "\n</ifm|tool_calls>"),
        ),
        "k2_horizon",
        "<ifm|think>",
        "</ifm|think>",
        special=(
            *("<ifm|think_fast>", "</ifm|think_fast>"),
            *("<ifm|think_faster>", "</ifm|think_faster>"),
        ),
    ),
    "kimi_k2": Format(
        partial(
            numbered,
            "<|tool_call_begin|>functions.{0}:{1}<|tool_call_argument_begin|>{2}<|tool_call_end|>",
            _KIMI,
        ),
        "kimi_k2",
    ),
    "kimi_k3": Format(
        kimi_k3,
        "kimi_k3",
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        "<|open|>response<|sep|>{}<|close|>response<|sep|>",
    ),
    "lfm2": Format(partial(pythonic, "<|tool_call_start|>", "<|tool_call_end|>")),
    "ling3": Format(partial(keys, *_GLM), "ling3"),
    "llama3_json": Format(
        lambda calls: "<|python_tag|>" + "; ".join(objects(calls, "parameters")), alone=True
    ),
    "llama4_json": Format(
        lambda calls: "<|python_tag|>" + "; ".join(objects(calls, "parameters")), alone=True
    ),
    "llama4_pythonic": Format(partial(pythonic, "<|python_start|>", "<|python_end|>"), alone=True),
    "longcat": Format(partial(each, "<longcat_tool_call>", "</longcat_tool_call>")),
    "mimo": Format(_QWEN, "mimo"),
    "minicpm5": Format(
        partial(
            keys,
            '<function name="{0}">{1}</function>',
            '<param name="{0}">{1}</param>',
            between="",
        )
    ),
    "minimax_m2": Format(
        partial(keys, *_INVOKE, around=("<minimax:tool_call>\n", "\n</minimax:tool_call>")),
        "minimax_m2",
        opening="",
        special=("<think>", "</think>"),
    ),
    "minimax_m3": Format(
        partial(
            keys,
            ']<]minimax[>[<invoke name="{0}">\n{1}]<]minimax[>[</invoke>\n',
            "]<]minimax[>[<{0}>{1}]<]minimax[>[</{0}>\n",
            around=("]<]minimax[>[<tool_call>\n", "]<]minimax[>[</tool_call>"),
            between="",
        ),
        "minimax_m3",
        special=("]<]minimax[>[", "<mm:think>", "</mm:think>"),
        opening="<mm:think>",
        closing="</mm:think>",
    ),
    "mistral": Format(
        partial(array, "[TOOL_CALLS]", ""), "mistral", "[THINK]", "[/THINK]", special=("[ARGS]",)
    ),
    "muse": Format(_ATEM, "muse", **_MUSE),
    "muse_glimmer": Format(_ATEM, "muse_glimmer", **_MUSE),
    "musespark1x": Format(_ATEM, "musespark1x", **_MUSE),
    "olmo3": Format(
        partial(pythonic, "<function_calls>", "</function_calls>", between="\n", around=""),
        "olmo3",
        special=("Ġ</", "</", "think", ">", ">\n", ">\n\n"),
        alone=True,
    ),
    "openai": Format(
        lambda calls: "",
        not_compared="reads token ids of Harmony's own vocabulary, which it downloads",
    ),
    "phi4_mini_json": Format(partial(array, "functools", ""), alone=True),
    "plamo3": Format(
        partial(
            numbered,
            _PLAMO,
            (
                "<|plamo:begin_tool_requests:plamo|>",
                "<|plamo:end_tool_requests:plamo|>",
            ),
        ),
        "plamo3",
        "<|plamo:begin_think:plamo|>",
        "<|plamo:end_think:plamo|>",
        special=("<|plamo:tag|>",),
    ),
    "poolside_v1": Format(
        partial(keys, *_GLM), "poolside_v1", special=("<assistant>", "</assistant>")
    ),
    "pythonic": Format(partial(pythonic, "", ""), alone=True),
    "qwen3_coder": Format(_QWEN, "qwen3"),
    "qwen3_json": Format(_HERMES, "qwen3"),
    "qwen3_xml": Format(_QWEN, "qwen3"),
    "seed_oss": Format(
        partial(keys, f"<seed:tool_call>\n{_FUNCTION[0]}\n</seed:tool_call>", _FUNCTION[1]),
        "seed_oss",
        "<seed:think>",
        "</seed:think>",
    ),
    "step3": Format(
        partial(
            keys,
            *_STEP3,
            around=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
            between="",
        ),
        "step3",
    ),
    "step3p5": Format(_QWEN, "step3p5"),
    "step5": Format(_QWEN, "step5"),
    "xlam": Format(partial(array, "", ""), alone=True),
}
