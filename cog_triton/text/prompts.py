"""Prompt templates: prompt and system prompt rendered to the text that is tokenized.

The first of these that is set is used: the request's ``prompt_template``, the default
one (``PROMPT_TEMPLATE``), the tokenizer's chat template, ``{prompt}``. The first two are Python
format strings with no fields but ``{prompt}`` and ``{system_prompt}``, as they are; values are
never interpreted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from string import Formatter

from cog_triton.errors import (
    BadPromptTemplate,
    PromptRequired,
    PromptTemplateError,
    PromptTooLong,
    nearest,
)
from cog_triton.text.chat_template import most_text, render_chat
from cog_triton.text.tokenizer import EngineTokenizer

MAX_FIELDS = 16
"""Places of a template for the prompt or the system prompt."""
MAX_PIECES = 1 << 14
"""Parts of a template between fields and doubled braces."""
_FIELDS = ["prompt", "system_prompt"]


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """Text to tokenize, and whether the tokenizer adds its special tokens to it.

    `warnings` name inputs that were not used, without quoting them.
    """

    text: str
    add_special_tokens: bool
    warnings: tuple[str, ...] = ()


def render(
    prompt: str,
    system_prompt: str | None,
    *,
    request_template: str | None,
    default_template: str | None,
    tokenizer: EngineTokenizer,
) -> RenderedPrompt:
    """Render one prompt; a template that is None, or a blank default, counts as not set.

    Raises PromptRequired (E1001) when the text, or the prompt of a chat, is blank;
    BadPromptTemplate (E1003) when the template has no ``{prompt}`` for the prompt that was given,
    or more than `MAX_FIELDS` fields or `MAX_PIECES` pieces; PromptTooLong (E1002) when the text
    would have more than `most_text` characters; PromptTemplateError (E1004) when it is not a valid
    template; BadMessages (E1006) when the chat template refuses the messages.
    """
    system_prompt = system_prompt or ""
    if request_template is not None:
        return _format("prompt_template", request_template, prompt, system_prompt)
    if default_template:
        return _format("PROMPT_TEMPLATE", default_template, prompt, system_prompt)
    if tokenizer.chat_template is None:
        return _format("no prompt template", "{prompt}", prompt, system_prompt)
    if not prompt.strip():
        raise PromptRequired("the prompt is blank; a chat needs something to answer")
    messages = [{"role": "user", "content": prompt}]
    if system_prompt:
        messages.insert(0, {"role": "system", "content": system_prompt})
    text = render_chat(messages, tokenizer)
    warnings: tuple[str, ...] = ()
    if system_prompt.strip() not in text:
        warnings = ("system_prompt is not used: the model's chat template leaves it out",)
    return RenderedPrompt(text, add_special_tokens=False, warnings=warnings)


def _format(origin: str, template: str, prompt: str, system_prompt: str) -> RenderedPrompt:
    values = {"prompt": prompt, "system_prompt": system_prompt}
    pieces, used = [], []
    for literal, name in _parse(origin, template):
        pieces.append(literal)
        if name is not None:
            pieces.append(values[name])
            used.append(name)
        if len(used) > MAX_FIELDS or len(pieces) > MAX_PIECES:
            raise BadPromptTemplate(
                f"{origin} has more than {MAX_FIELDS} fields, or {MAX_PIECES} pieces between fields"
                " and doubled braces"
            )
    if prompt.strip() and "prompt" not in used:
        raise BadPromptTemplate(f"{origin} has no {{prompt}}, so the prompt would not be used")
    length = sum(map(len, pieces))
    most = most_text(len(template) + len(prompt) + len(system_prompt))
    if length > most:
        raise PromptTooLong(f"{origin} makes {length} characters of text; {most} at most")
    text = "".join(pieces)
    if not text.strip():
        raise PromptRequired("the prompt is blank")
    warnings: tuple[str, ...] = ()
    if system_prompt and "system_prompt" not in used:
        warnings = (f"system_prompt is not used: {origin} has no place for it",)
    return RenderedPrompt(text, add_special_tokens=True, warnings=warnings)


def _parse(origin: str, template: str) -> Iterator[tuple[str, str | None]]:
    """Parse a template into literal texts, each with the field after it."""
    hint = "a brace that is meant as text must be doubled, as in {{ and }}"
    try:
        for literal, name, spec, conversion in Formatter().parse(template):
            if name is not None and (name not in _FIELDS or spec or conversion not in (None, "s")):
                converted = f"!{conversion}" if conversion else ""
                written = name[:80] + converted + (f":{spec[:80]}" if spec else "")
                raise PromptTemplateError(
                    f"{origin}: {{{written}}}: only {{prompt}} and {{system_prompt}} are allowed"
                    f"{nearest(name, _FIELDS) if name not in _FIELDS else ''}; {hint}"
                )
            yield literal, name
    except ValueError as error:
        raise PromptTemplateError(f"{origin}: {error}; {hint}") from error
