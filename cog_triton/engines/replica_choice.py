"""Replica choice: which of several engines of one model gets a request.

Pure. A prompt whose first tokens an engine has computed lately is cheaper there, as it finds them
in its KV cache; the engine with the least work answers soonest. Both are counted alike: so many
tokens of a prompt weigh as much as one more request.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

TOKENS_A_REQUEST = 256
"""Tokens of a prompt that weigh as much as a request that runs."""
_SHORTEST = 32
_MAX_PREFIXES = 8192


class ReplicaChoice:
    """Chooses by load and by prefix; thread-safe.

    It knows prefixes of 32, 64, 128, ... tokens, the last 8192 that were sent to any engine: what
    an engine has dropped from its cache since then is taken for a hit.
    """

    def __init__(self) -> None:
        self._sent: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._lock = threading.Lock()
        self._last = -1

    def choose(
        self, prompt: Sequence[int], loads: Mapping[int, float], adapter: str | None = None
    ) -> int:
        """The engine for `prompt` among those of `loads`, at least one: work of each in requests.

        One that has a prefix gets it, unless it has more than a request for every 256 tokens of
        that prefix more to do than the least busy one. Of equals, they take turns. Prefixes of
        another `adapter` are others.
        """
        prefixes = list(_prefixes(prompt, adapter))
        with self._lock:
            count = max(loads) + 1
            engine = min(
                loads,
                key=lambda engine: (
                    loads[engine] - self._known(engine, prefixes) / TOKENS_A_REQUEST,
                    (engine - self._last - 1) % count,
                ),
            )
            self._last = engine
            for _, key in prefixes:
                self._sent[engine, key] = None
                self._sent.move_to_end((engine, key))
            while len(self._sent) > _MAX_PREFIXES:
                self._sent.popitem(last=False)
        return engine

    def forget(self, engine: int) -> None:
        """Forget the prefixes of an engine that has died."""
        with self._lock:
            for place in [place for place in self._sent if place[0] == engine]:
                del self._sent[place]

    def _known(self, engine: int, prefixes: Sequence[tuple[int, int]]) -> int:
        """Tokens of the longest of `prefixes` that the engine was sent."""
        known = (length for length, key in reversed(prefixes) if (engine, key) in self._sent)
        return next(known, 0)


def _prefixes(prompt: Sequence[int], adapter: str | None) -> Iterator[tuple[int, int]]:
    """Length and hash of each prefix, from the shortest."""
    content = memoryview(array("i", iter(prompt)).tobytes())  # of bytes, each is a number
    size, length = array("i").itemsize, _SHORTEST
    while length <= len(prompt):
        yield length, hash((adapter, bytes(content[: length * size])))
        length *= 2
