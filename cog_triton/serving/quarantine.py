"""Quarantine of prompts that the engine has died of: refused for a time, lest it dies again."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Callable

from cog_triton.errors import FatalRequest
from cog_triton.serving.generation import GenerationRequest

QUARANTINE_S = 600.0


class Quarantine:
    """Hashes of prompts, with adapter and images, that are refused with E2108."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[bytes, float] = {}

    def add(self, request: GenerationRequest) -> None:
        """Refuse this prompt for `QUARANTINE_S`."""
        now = self._clock()
        self._until = {key: until for key, until in self._until.items() if until > now}
        self._until[_key(request)] = now + QUARANTINE_S

    def check(self, request: GenerationRequest) -> None:
        """Raise E2108 for a prompt that is refused."""
        if self._until and (until := self._until.get(_key(request))) is not None:
            left = until - self._clock()
            if left > 0:
                raise FatalRequest(
                    f"the engine died of this prompt before; it is refused for another {left:.0f} s"
                )


def _key(request: GenerationRequest) -> bytes:
    made = hashlib.sha256(array("q", request.engine.input_ids).tobytes())
    made.update((request.engine.adapter or "").encode())
    for image in request.engine.images:
        made.update(image.data)
    return made.digest()
