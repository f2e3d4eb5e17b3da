"""Names of a request's fields, by those of the chat that it was translated to, for its errors.

A chat's parser names what it refuses by the fields of /v1/chat/completions; who has sent another
API's request looks for its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cog_triton.errors import BadMessages, InvalidArgument

_MESSAGE = re.compile(r"(messages\[\d+\])(\.content\[\d+\])?(?:\.image_url(?:\.url)?)?")
_TOOL = re.compile(r"tools[\[.](\d+)\]?(?:\.function)?")


class PlacedMessage(NamedTuple):
    """Message of a chat, what of the request it was made of, and so each part of its content."""

    message: dict[str, Any]
    where: str
    parts: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Names of one request's fields: `rules` are of its API, expressions and replacements."""

    rules: Sequence[tuple[str, str]]
    _places: dict[str, str] = field(default_factory=dict)

    def messages(self, placed: Iterable[PlacedMessage]) -> list[dict[str, Any]]:
        """The messages of a chat, whose places are kept."""
        found: list[dict[str, Any]] = []
        for message, where, parts in placed:
            name = f"messages[{len(found)}]"
            self._places[name] = where
            self._places.update((f"{name}.content[{at}]", part) for at, part in enumerate(parts))
            found.append(message)
        return found

    def place_tools(self, places: Iterable[str]) -> None:
        """Store where the request has each tool of a chat."""
        self._places.update((f"tools[{at}]", place) for at, place in enumerate(places))

    @contextmanager
    def told(self) -> Iterator[None]:
        """Have the errors of a context tell the request's own names."""
        try:
            yield
        except (InvalidArgument, BadMessages) as error:
            raise type(error)(self.renamed(error.detail)) from error

    def renamed(self, text: str) -> str:
        """An error's text, whose first word is a field of the chat."""
        if found := _MESSAGE.match(text):
            message, part = found[1], found[2] or ""
            if own := self._places.get(message + part):
                return own + text[found.end() :]
            return self._places.get(message, message) + text[found.end(1) :]
        if (found := _TOOL.match(text)) and (own := self._places.get(f"tools[{found[1]}]")):
            return own + text[found.end() :]
        for expression, own in self.rules:
            renamed, count = re.subn(rf"\A{expression}(?![\w-])", own, text, count=1)
            if count:
                return renamed
        return text
