"""Images in chat messages: parts, and what a chat template makes of them.

A template that reads parts writes the model's own placeholder for ``{"type": "image"}``; for
others the placeholder goes before the message's text, as in vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cog_triton.errors import BadMessages, CogTritonError
from cog_triton.system.log_notes import log_once, note_unknown
from cog_triton.system.printable import shortened
from cog_triton.text.chat_template import render_chat
from cog_triton.text.tokenizer import EngineTokenizer

_log = logging.getLogger(__name__)

_DETAILS = ("auto", "low", "high")
_PROBE = "a text of 3 words"
_IMAGE = {"type": "image"}
_TEXT = {"type": "text", "text": _PROBE}

Message = dict[str, Any]


class ImageURL(NamedTuple):
    """URL of an image part, and the part's name in errors."""

    where: str
    url: str


def parse_image_part(where: str, part: Mapping[str, Any]) -> ImageURL:
    """The URL of a part ``{"type": "image_url", "image_url": {"url": ..., "detail": ...}}``.

    Raises BadMessages (E1006) naming what is wrong below `where`.
    """
    # `uuid` is vLLM's, for its cache.
    note_unknown(_log, "key of a content part", part.keys() - {"type", "image_url", "uuid"})
    given = part.get("image_url")
    where = f"{where}.image_url"
    if isinstance(given, dict):
        note_unknown(_log, "key of an image_url", given.keys() - {"url", "detail"})
        detail = given.get("detail")
        if detail is not None and detail not in _DETAILS:
            raise BadMessages(
                f"{where}.detail={shortened(detail)}: must be one of {', '.join(_DETAILS)}"
            )
        if detail not in (None, "auto"):
            log_once(_log, "image_url.detail has no effect: the model's own resolution is used")
        given = given.get("url")
    if not isinstance(given, str):
        raise BadMessages(f"{where}.url: must be text: the image's URL")
    return ImageURL(where, given)


@dataclass(frozen=True, slots=True)
class ImageForm:
    """How messages with images are written for a chat template.

    With `reads_parts` the template takes parts; with `only_parts` it takes no plain text as
    content. Else `placeholder` is written for each image, ``{}`` in it being its number from 1.
    """

    reads_parts: bool = False
    only_parts: bool = False
    placeholder: str | None = None

    def write(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template takes them."""
        if self.reads_parts:
            return [_in_parts(message) if self.only_parts else message for message in messages]
        return self._with_placeholders(messages)

    def _with_placeholders(self, messages: Sequence[Message]) -> list[Message]:
        written, number = [], 0
        for message in messages:
            content = message["content"]
            if isinstance(content, list):
                lines = []
                for _ in (part for part in content if part["type"] == "image"):
                    number += 1
                    lines.append((self.placeholder or "").replace("{}", str(number)))
                lines += [part["text"] for part in content if part["type"] == "text"]
                message = {**message, "content": "\n".join(lines)}
            written.append(message)
        return written


def image_form(tokenizer: EngineTokenizer, placeholder: str | None) -> ImageForm | None:
    """The form for the tokenizer's chat template, found by rendering it; None if there is none.

    `placeholder` is the model's, if it is known.
    """
    with_image = _rendered(tokenizer, [_IMAGE, _TEXT])
    without = _rendered(tokenizer, [_TEXT])
    if _PROBE in without and _PROBE in with_image and with_image != without:
        as_text = [f"{quote}type{quote}" in with_image for quote in "'\""]
        if not any(as_text):  # the list itself, written out
            return ImageForm(
                reads_parts=True, only_parts=_PROBE not in _rendered(tokenizer, _PROBE)
            )
    if placeholder is not None and _PROBE in _rendered(tokenizer, _PROBE):
        return ImageForm(placeholder=placeholder)
    return None


def _rendered(tokenizer: EngineTokenizer, content: str | list[dict[str, str]]) -> str:
    """What the template makes of one message, empty if it refuses it."""
    try:
        return render_chat([{"role": "user", "content": content}], tokenizer)
    except CogTritonError:
        return ""


def _in_parts(message: Message) -> Message:
    content = message["content"]
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}
