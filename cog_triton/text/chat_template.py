"""Chat template of the tokenizer, rendered in a sandbox as Hugging Face does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cog_triton.errors import BadMessages, TritonTokenizerError
from cog_triton.text.tokenizer import EngineTokenizer


def render_chat(messages: Sequence[Mapping[str, Any]], tokenizer: EngineTokenizer) -> str:
    """Render the model's chat template for `messages`, up to the assistant's turn.

    The text carries its own BOS: encode it with ``add_special_tokens=False``. Raises BadMessages
    (E1006) when the template refuses the messages or the model has none, TritonTokenizerError
    (E2102) when the template itself is broken.
    """
    try:
        return _apply(messages, tokenizer)
    except BadMessages as error:
        others = [message for message in messages if message.get("role") != "system"]
        if len(others) == len(messages):
            raise
        _apply(others, tokenizer)
        raise BadMessages(f"{error.detail}; this model takes no system prompt") from error


def _apply(messages: Sequence[Mapping[str, Any]], tokenizer: EngineTokenizer) -> str:
    if tokenizer.chat_template is None:
        raise BadMessages("the model has no chat template; use a prompt instead of messages")
    template = _compile(tokenizer.chat_template)
    try:
        return template.render(
            messages=messages,
            add_generation_prompt=True,
            bos_token=tokenizer.bos_token or "",
            eos_token=tokenizer.eos_token or "",
        )
    except TemplateError as error:
        raise BadMessages(f"the model's chat template refuses the messages: {error}") from error
    except Exception as error:  # a template can fail in as many ways as any program
        detail = f"the model's chat template fails: {type(error).__name__}: {error}"
        raise BadMessages(detail) from error


class _Generation(Extension):
    """``{% generation %}``, training targets in some chat templates: rendered as text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


@lru_cache(maxsize=16)
def _compile(source: str) -> Template:
    """Compile a template in the environment that Hugging Face gives chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        detail = f"the chat template is broken: line {error.lineno}: {error.message}"
        raise TritonTokenizerError(detail) from error
