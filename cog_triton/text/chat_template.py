"""Chat template of the tokenizer, rendered in a sandbox as Hugging Face does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cog_triton.errors import BadMessages
from cog_triton.text.template_process import POOL, TemplateRefused
from cog_triton.text.tokenizer import EngineTokenizer


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: EngineTokenizer,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render the model's chat template for `messages`, up to the assistant's turn.

    `variables` are more of what it reads; with `tools`, it is the model's template for tools, if
    that is another. The text carries its own BOS: encode it with ``add_special_tokens=False``.
    Raises BadMessages (E1006) when the template refuses the messages, would leave out calls of
    tools or exceeds its limits, or the model has none, TritonTokenizerError (E2102) when the
    template itself is broken.
    """
    variables = variables or {}
    template = tokenizer.template_for(tools="tools" in variables)
    if template is None:
        raise BadMessages("the model has no chat template; use a prompt instead of messages")
    _check_calls(template, messages)
    try:
        return _apply(template, messages, tokenizer, variables)
    except TemplateRefused as error:
        others = [message for message in messages if message.get("role") != "system"]
        if len(others) == len(messages):
            raise BadMessages(str(error)) from error
        try:
            _apply(template, others, tokenizer, variables)
        except TemplateRefused as other:
            raise BadMessages(str(other)) from other
        raise BadMessages(f"{error}; this model takes no system prompt") from error


def _check_calls(template: str, messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse calls of tools, and their results, that the template would leave out."""
    for place, message in enumerate(messages):
        if ("tool_calls" in message or message["role"] == "tool") and "tool_calls" not in template:
            raise BadMessages(
                f"messages[{place}]: the model's chat template knows no calls of tools; set"
                " CHAT_TEMPLATE to one that does"
            )


def _apply(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tokenizer: EngineTokenizer,
    variables: Mapping[str, Any],
) -> str:
    return POOL.render(
        template,
        {
            **variables,
            "messages": list(messages),
            "add_generation_prompt": True,
            "bos_token": tokenizer.bos_token or "",
            "eos_token": tokenizer.eos_token or "",
        },
    )
