"""Events to text as the original cog-triton does it: each token costs as much as all before it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import numpy as np


async def events(response: httpx.Response) -> AsyncIterator[Any]:
    """The data of server-sent events, read by line."""
    data: list[str] = []
    async for line in response.aiter_lines():
        name, _, value = line.rstrip("\n").partition(":")
        if name == "data":
            data.append(value.removeprefix(" "))
        elif not line and data:
            yield json.loads("\n".join(data))
            data.clear()


class Text:
    """What a token adds to the text: all tokens are decoded anew, less what they said before."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._said = ""
        self.tokens = np.array([], dtype=np.int32)

    def feed(self, ids: int | Sequence[int]) -> str:
        """The text that is new; characters that are not whole yet are taken out."""
        self.tokens = np.append(self.tokens, ids)
        said = self._decode(self.tokens.tolist()).replace("\N{REPLACEMENT CHARACTER}", "")
        new = said.removeprefix(self._said)
        self._said = said
        return new


class Stops:
    """Finds a stop string only where it begins with a piece of text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held: list[str] = []
        self._stopped = False

    def feed(self, text: str) -> str:
        """The text that may go out; raises RuntimeError for any that comes after a stop string."""
        if not self._stops:
            return text
        if self._stopped:
            raise RuntimeError("the stop sequence was complete, and there are more tokens")
        self._held.append(text)
        whole = "".join(self._held)
        if whole in self._stops:
            self._stopped = True
            self._held.clear()
            return ""
        if any(stop.startswith(whole) for stop in self._stops):
            return ""
        self._held.clear()
        return whole

    def finish(self) -> str:
        """What was held back."""
        return "".join(self._held)
