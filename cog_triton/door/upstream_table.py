"""Table of upstreams: every backend chain behind the front door, and who gets new requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cog_triton.door.upstream import Upstream

if TYPE_CHECKING:
    from cog_triton.door.swapping import Swapping


class Upstreams:
    """Table of the upstreams of one door; `serving` gets all new requests."""

    def __init__(self, serving: Upstream) -> None:
        self.serving = serving
        self.swapping: Swapping | None = None
        """What chooses `serving` by the model of a request, with several models."""
        self.stopping = False
        """Whether the door drains: no new request is taken any more."""
        self.ask_to_stop: Callable[[], None] = lambda: None
        """Begins the graceful stop of the door."""
        self._all = [serving]

    def __iter__(self) -> Iterator[Upstream]:
        return iter(tuple(self._all))

    def add(self, upstream: Upstream) -> None:
        """Take one more, which gets no requests yet."""
        self._all.append(upstream)

    def remove(self, upstream: Upstream) -> None:
        """Forget one that does not serve."""
        self._all.remove(upstream)


@dataclass(frozen=True, slots=True)
class Route:
    """Way from a public port to the servers behind it: `port` is the name of its setting."""

    upstreams: Upstreams
    port: str

    @property
    def others(self) -> list[Upstream]:
        """Upstreams that get no new requests, and may have predictions that run."""
        return [one for one in self.upstreams if one is not self.upstreams.serving]

    @property
    def upstream(self) -> Upstream:
        """The upstream that a new request goes to."""
        return self.upstreams.serving

    async def upstream_of(self, model: str | None = None) -> Upstream:
        """The upstream for a request of `model`, once that has its turn; then pass it on at once.

        Raises E1009 for a model that is not served, and E2107 where too many wait.
        """
        swapping = self.upstreams.swapping
        return self.upstream if swapping is None else await swapping.turn_of(model)
