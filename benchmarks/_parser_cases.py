"""Formats of vLLM's parsers, by their names: how a model writes calls and reasoning."""

# The marks of DeepSeek and Step are written with a wide bar.
# ruff: noqa: RUF001

from __future__ import annotations

from functools import partial
from typing import Any

from _parser_syntax import (
    Format,
    array,
    dsml,
    each,
    gemma,
    json_text,
    keys,
    kimi_k3,
    named_array,
    numbered,
    objects,
    pythonic,
)

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
