"""Body of a request, which the front has bounded, and its JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from starlette.exceptions import HTTPException
from starlette.requests import Request

from cog_triton.errors import BadMessages, InvalidArgument
from cog_triton.system.printable import shortened


async def read_body(request: Request) -> bytes:
    """The body; raises 415 if it is not said to be JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(
            415,
            f"Content-Type: {kind[:80]!r}; must be application/json, as of curl -H"
            " 'Content-Type: application/json'",
        )
    return b"".join([chunk async for chunk in request.stream()])  # `body` would not free it


def parse_body(raw: bytes) -> Any:
    """The JSON value of a body; raises E1005."""
    try:
        return json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # not UTF-8 is a ValueError, too
        raise InvalidArgument(f"the body is not JSON: {str(error)[:200]}") from None


def check_ids(field: str, tokens: Iterable[int], vocab_size: int) -> None:
    """Raise E1005 for a token id that is not in the vocabulary."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise InvalidArgument(
                f"{field}: holds {shortened(token)}; must be from 0 to {vocab_size - 1}, the"
                " model's vocabulary"
            )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def given_fields(body: Any, refused: Mapping[str, str]) -> dict[str, Any]:
    """Fields of a request's JSON value that are not null.

    Raises E1005 where it is no object, and for those `refused`, by name and reason, that ask for
    something.
    """
    if not isinstance(body, dict):
        raise InvalidArgument("the body must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    for name, reason in refused.items():
        if given.get(name):
            raise InvalidArgument(f"{name}: not supported: {reason}")
    return given


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
    def in_errors(self) -> Iterator[None]:
        """Have errors name the request's fields."""
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
