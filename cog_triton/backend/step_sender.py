"""Sending end of a step stream: numbers, retention, flow control, resending.

Without Triton and without a clock, so that tests see all of it. Every step is kept until it is
acknowledged; once too much is kept, new ones are merged and wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cog_triton.engines import step_items
from cog_triton.engines.step_items import StepItem
from cog_triton.engines.step_numbering import HEAD, HEARTBEAT, MAX_HANDLE, RESENT, Head

_MAX_KEPT_STEPS = 512
_MAX_KEPT_BYTES = 4 << 20
_MAX_INTS = (256 << 10) // 8
_MERGE_AT = 4096


class Response(NamedTuple):
    """A response of a step stream, as tensors; `numbers` is int64, `log_probs` float32."""

    numbers: npt.NDArray[np.int64]
    log_probs: npt.NDArray[np.float32]
    errors: Sequence[str]

    @property
    def size(self) -> int:
        """Bytes that it holds."""
        return self.numbers.nbytes + self.log_probs.nbytes + sum(map(len, self.errors))


class Ended(NamedTuple):
    """End of a request: `tokens` counts its sequence's; the rest is as in `StepItem`."""

    handle: int
    end: int
    tokens: int
    error: str | None


class Part:
    """What a step of the engine has for one stream, in the encoding of `step_items`."""

    __slots__ = ("count", "ended", "errors", "ints", "log_probs")

    def __init__(self) -> None:
        self.ints: list[int] = []
        self.count = 0
        self.log_probs: list[float] = []
        self.errors: list[str] = []
        self.ended: list[Ended] = []


def split(ints: list[int], log_probs: list[float], errors: list[str]) -> dict[int, Part]:
    """Split a step by stream: the upper bits of its handles, which are taken off in `ints`."""
    places: list[int] = []
    ended: list[int] = []
    at, size = 0, len(ints)
    while at < size:
        places.append(at)
        count, width = ints[at + 4], ints[at + 5]
        if ints[at + 3]:
            ended.append(at)
        at += 6 + (count * width if width > 1 else count)
    streams = {ints[at] >> 40 for at in places}
    if len(streams) > 1:
        return _parted(ints, log_probs, errors)
    if streams != {0}:
        for at in places:
            ints[at] &= MAX_HANDLE
    part = Part()
    part.ints, part.count, part.log_probs, part.errors = ints, len(places), log_probs, errors
    texts = iter(errors)
    for at in ended:
        handle, _, offset, end, count, _ = ints[at : at + 6]
        error = next(texts) if end == step_items.ERROR else None
        part.ended.append(Ended(handle, end, offset + count, error))
    return dict.fromkeys(streams, part)


def _parted(ints: list[int], log_probs: list[float], errors: list[str]) -> dict[int, Part]:
    """The parts of a step that several streams share."""
    items: dict[int, list[StepItem]] = {}
    for item in step_items.decode(ints, log_probs, errors):
        mine = item._replace(handle=item.handle & MAX_HANDLE)
        items.setdefault(item.handle >> 40, []).append(mine)
    return {stream: part_of(found) for stream, found in items.items()}


def part_of(items: Iterable[StepItem]) -> Part:
    """The part that holds `items`, of one stream."""
    items = list(items)
    part, encoded = Part(), step_items.encode(items)
    part.ints, part.log_probs = encoded.items.tolist(), encoded.log_probs.tolist()
    part.errors, part.count = encoded.errors, len(items)
    part.ended = _ends_of(items)
    return part


def _ends_of(items: Iterable[StepItem]) -> list[Ended]:
    return [
        Ended(item.handle, item.end, item.offset + len(item.ids), item.error)
        for item in items
        if item.end
    ]


class StepSender:
    """Numbers, keeps and sends the steps of one stream; not thread-safe."""

    def __init__(
        self,
        epoch: int,
        send: Callable[[Response], None],
        on_end: Callable[[Ended, int], None],
    ) -> None:
        """`on_end` gets each request's end once step `number` with it has been sent."""
        self._epoch = epoch
        self._send = send
        self._on_end = on_end
        self._number = 0
        self._kept: deque[tuple[int, Response, int]] = deque()
        self._kept_bytes = 0
        self._waiting: list[StepItem] = []
        self._merged = 0
        self._oldest = self._ticks = 0

    @property
    def is_full(self) -> bool:
        """Whether what is sent has to be acknowledged before more is."""
        return len(self._kept) >= _MAX_KEPT_STEPS or self._kept_bytes >= _MAX_KEPT_BYTES

    @property
    def last_number(self) -> int:
        """Number of the last step that was sent."""
        return self._number

    def add(self, part: Part) -> None:
        """Send a part of a step, or have it wait."""
        if not self._waiting and len(part.ints) <= _MAX_INTS and not self.is_full:
            self._send_step(part)
            return
        self._waiting += step_items.decode(part.ints, part.log_probs, part.errors)
        if len(self._waiting) > 2 * self._merged + _MERGE_AT:
            self._merge()
        self._flush()

    def acknowledge(self, number: int) -> None:
        """Forget all steps up to `number`, and send what waits."""
        kept = self._kept
        while kept and kept[0][0] <= number:
            self._kept_bytes -= kept.popleft()[2]
        self._flush()

    def first_kept(self, number: int) -> int:
        """Number of the first step, from `number` on, that can be sent again."""
        oldest = self._kept[0][0] if self._kept else self._number + 1
        return max(number, oldest)

    def resend(self, number: int) -> None:
        """Send all kept steps from `number` on again, in order."""
        for kept, response, _ in tuple(self._kept):
            if kept >= number:
                numbers = response.numbers.copy()
                head = Head(*numbers[:HEAD])
                numbers[:HEAD] = head._replace(flags=head.flags | RESENT)
                self._send(response._replace(numbers=numbers))

    def heartbeat(self) -> None:
        """Tell the number of the last step."""
        head = np.array(Head(self._epoch, self._number, HEARTBEAT), np.int64)
        self._send(Response(head, np.empty(0, np.float32), ()))

    def close(self) -> None:
        """Tell `on_end` of the ends that wait, as in step 0: they are not sent any more."""
        waiting, self._waiting = self._waiting, []
        for ended in _ends_of(waiting):
            self._on_end(ended, 0)

    def ticks_unacknowledged(self) -> int:
        """Calls of this during which the oldest step that is kept has been the same."""
        oldest = self._kept[0][0] if self._kept else 0
        self._ticks = self._ticks + 1 if oldest and oldest == self._oldest else 0
        self._oldest = oldest
        return self._ticks

    def _merge(self) -> None:
        self._waiting = step_items.merge(self._waiting)
        self._merged = len(self._waiting)

    def _flush(self) -> None:
        if self._waiting and not self.is_full:
            self._merge()
        while self._waiting and not self.is_full:
            self._send_step(part_of(self._taken()))
        if not self._waiting:
            self._merged = 0

    def _taken(self) -> list[StepItem]:
        """Take as much of what waits as one response holds; at least a part of the first item."""
        taken: list[StepItem] = []
        room = _MAX_INTS
        for item in self._waiting:
            room -= 6 + len(item.ids) + len(item.alternatives)
            if room < 0:
                break
            taken.append(item)
        del self._waiting[: len(taken)]
        if not taken:
            first, rest = _halves(self._waiting[0], _MAX_INTS - 6)
            self._waiting[0] = rest
            taken.append(first)
        return taken

    def _send_step(self, part: Part) -> None:
        self._number = number = self._number + 1
        head = Head(self._epoch, number, 0, part.count)
        numbers = np.array([*head, *part.ints], np.int64)
        response = Response(numbers, _finite(part.log_probs), part.errors)
        size = response.size
        self._kept.append((number, response, size))
        self._kept_bytes += size
        self._send(response)
        for ended in part.ended:
            self._on_end(ended, number)


def _halves(item: StepItem, ints: int) -> tuple[StepItem, StepItem]:
    """Divide an item, so that the first one's ids and alternatives are no more than `ints`."""
    width = max(item.width, 1)
    count = max(1, ints // width)
    others = width - 1
    first = item._replace(
        ids=item.ids[:count],
        log_probs=item.log_probs[: count * item.width],
        alternatives=item.alternatives[: count * others],
        end=step_items.GOES_ON,
        error=None,
    )
    rest = item._replace(
        offset=item.offset + count,
        ids=item.ids[count:],
        log_probs=item.log_probs[count * item.width :],
        alternatives=item.alternatives[count * others :],
    )
    return first, rest


def _finite(values: Sequence[float]) -> npt.NDArray[np.float32]:
    """Log probabilities as JSON can hold them: without infinities."""
    found = np.array(values, np.float32)
    if found.size:
        lowest = float(np.finfo(np.float32).min)
        np.nan_to_num(found, copy=False, nan=lowest, neginf=lowest)
    return found
