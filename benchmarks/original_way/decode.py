"""Detokenizing as the original cog-triton does it: each token decodes all before it again."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import numpy as np


async def events(response: httpx.Response) -> AsyncIterator[Any]:
    """Data of server-sent events, read by line."""
    data: list[str] = []
    async for line in response.aiter_lines():
        name, _, value = line.rstrip("\n").partition(":")
        if name == "data":
            data.append(value.removeprefix(" "))
        elif not line and data:
            yield json.loads("\n".join(data))
            data.clear()


class Text:
    """Incremental text: decodes all tokens again, and cuts off the text that was there before."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._said = ""
        self.tokens = np.array([], dtype=np.int32)

    def feed(self, ids: int | Sequence[int]) -> str:
        """New text of `ids`; incomplete characters are removed."""
        self.tokens = np.append(self.tokens, ids)
        said = self._decode(self.tokens.tolist()).replace("\N{REPLACEMENT CHARACTER}", "")
        new = said.removeprefix(self._said)
        self._said = said
        return new


class Stops:
    """Stop string matcher; finds a stop string only where it starts with a piece."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held: list[str] = []
        self._stopped = False

    def feed(self, text: str) -> str:
        """Text to send; raises RuntimeError for text after a stop string."""
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
        """Text held back at the end."""
        return "".join(self._held)
