"""Choice of the parsers of a model's answers: by setting, or by what its chat template contains."""

from __future__ import annotations

from collections.abc import Mapping

from cog_triton.serving.openai.parsers.call_parser import CallParser
from cog_triton.serving.openai.parsers.hermes import HermesParser
from cog_triton.serving.openai.parsers.llama3_json import Llama3JsonParser
from cog_triton.serving.openai.parsers.mistral import MistralParser
from cog_triton.serving.openai.parsers.pythonic import PythonicParser
from cog_triton.settings.request_defaults import RequestSettings
from cog_triton.text.template_variables import template_variables
from cog_triton.text.tokenizer import EngineTokenizer

CALL_PARSERS: Mapping[str, type[CallParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}
REASONING_MARKERS: Mapping[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
# What is like Hermes' format, and has no JSON within the tags: Qwen3-Coder, GLM.
_NOT_HERMES = ("<function=", "<arg_key>")
_FOUND_BY = {
    "mistral": ("[TOOL_CALLS]",),
    "hermes": ("<tool_call>",),
    "llama3_json": ("<|python_tag|>", '"parameters": dictionary'),
    "pythonic": ("func_name1(", "<|python_start|>", "<|tool_call_start|>", "<|tool_list_start|>"),
}


def call_parser(settings: RequestSettings, tokenizer: EngineTokenizer) -> str | None:
    """Name of the parser of tool calls: TOOL_CALL_PARSER, or what the template teaches."""
    if settings.tool_call_parser != "auto":
        return None if settings.tool_call_parser == "none" else settings.tool_call_parser
    template = tokenizer.template_for(tools=True) or ""
    if "tools" not in template_variables(template):
        return None
    for name, marks in _FOUND_BY.items():
        if _has_any(template, marks):
            return None if name == "hermes" and _has_any(template, _NOT_HERMES) else name
    return None


def reasoning_parser(settings: RequestSettings, tokenizer: EngineTokenizer) -> str | None:
    """Name of the parser of reasoning: REASONING_PARSER, or what the template knows."""
    if settings.reasoning_parser != "auto":
        return None if settings.reasoning_parser == "none" else settings.reasoning_parser
    template = tokenizer.template_for(tools=False) or ""
    found = (name for name, (_, closing) in REASONING_MARKERS.items() if closing in template)
    return next(found, None)


def _has_any(text: str, marks: tuple[str, ...]) -> bool:
    return any(mark in text for mark in marks)
