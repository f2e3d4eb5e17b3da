"""Step items: what one engine step made, of all requests, as one flat array of int64.

An item is ``handle, sequence, offset, end, id_count, width, ids...[, alternatives...]``. A step is
its items one after the other, their log probabilities as float32 in the same order, and the texts
of its errors. Little-endian, as every machine that runs this.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cog_triton.engines.request import FinishReason, TokenEvent
from cog_triton.errors import TritonMalformedEvent

GOES_ON, STOP, LENGTH, CANCELLED, ERROR = range(5)
"""Values of `StepItem.end`."""

NO_TOKEN = -1
"""Among `StepItem.alternatives`: the engine told fewer."""

PROMPT = -1
"""`StepItem.sequence` of tokens of the prompt itself; output sequences are counted from 0.

An item of it without ids tells the prompt's length, those of its images included, as `offset`.
"""

CACHED = -3
"""`StepItem.sequence`; `offset` counts the prompt's tokens that were in the engine's KV cache."""

EMBEDDING = -2
"""`StepItem.sequence` of an embedding: no ids, and `width` numbers as `log_probs`."""

FINISH_REASONS: Mapping[int, FinishReason] = {
    STOP: "stop",
    LENGTH: "length",
    CANCELLED: "cancelled",
}
END_OF_FINISH: Mapping[FinishReason | None, int] = {
    None: GOES_ON,
    **{text: end for end, text in FINISH_REASONS.items()},
}
_HEAD = 6
_EXCERPT = 24


class StepItem(NamedTuple):
    """New tokens of one output sequence of one request.

    `offset` is the number of the sequence's tokens before this item, so that a gap is seen. `end`
    is one of the constants above; `error` is the coded text when it is `ERROR`. `width` is the
    number of log probabilities a token: 0 none, 1 the sampled token's, k also those of k - 1
    `alternatives`, which are the likeliest tokens, the sampled one among them. `log_probs` holds
    len(ids) * width values, token by token, the sampled one first; `alternatives` holds
    len(ids) * (width - 1) token ids, token by token.
    """

    handle: int
    sequence: int
    offset: int
    ids: list[int]
    log_probs: list[float]
    end: int = GOES_ON
    error: str | None = None
    width: int = 0
    alternatives: Sequence[int] = ()


class EncodedStep(NamedTuple):
    """A step as it crosses processes; `items` are int64, `log_probs` float32."""

    items: array[int]
    log_probs: array[float]
    errors: list[str]


class StepBuffer:
    """A step while it is collected, already in its encoded form."""

    __slots__ = ("errors", "items", "log_probs")

    def __init__(self) -> None:
        self.items: list[int] = []
        self.log_probs: list[float] = []
        self.errors: list[str] = []

    def add(self, handle: int, offset: int, event: TokenEvent, width: int = 0) -> int:
        """Add an event of a request's only sequence; returns the offset of the next one."""
        ids = event.token_ids
        if event.cached_tokens:
            self.items += (handle, CACHED, event.cached_tokens, GOES_ON, 0, 0)
            if not event.token_ids:
                return offset
        if event.of_prompt:
            head = (handle, PROMPT, event.prompt_length, GOES_ON, len(ids), width)
            self.items += (*head, *ids, *event.alternatives)
            self.log_probs += event.log_probs
            return offset
        if event.error is not None:
            end = ERROR
            self.errors.append(str(event.error))
        else:
            end = END_OF_FINISH[event.finish]
        if event.embedding:
            self.items += (handle, EMBEDDING, 0, end, 0, len(event.embedding))
            self.log_probs += event.embedding
            return offset
        self.items += (handle, 0, offset, end, len(ids), width, *ids)
        if width:
            self.items += event.alternatives
            self.log_probs += event.log_probs
        return offset + len(ids)

    def encoded(self) -> EncodedStep:
        """The step."""
        return EncodedStep(array("q", self.items), array("f", self.log_probs), self.errors)

    def merge(self) -> None:
        """Coalesce the items of each sequence, as `merge` does."""
        merged = encode(merge(decode(self.items, self.log_probs, self.errors)))
        self.items, self.log_probs = merged.items.tolist(), merged.log_probs.tolist()
        self.errors = merged.errors


def encode(items: Iterable[StepItem]) -> EncodedStep:
    """Encode items for `decode`."""
    ints: list[int] = []
    floats: list[float] = []
    errors: list[str] = []
    for handle, sequence, offset, ids, log_probs, end, error, width, alternatives in items:
        ints += (handle, sequence, offset, end, len(ids), width, *ids, *alternatives)
        if width:
            floats += log_probs
        if end == ERROR:
            errors.append(error or "")
    return EncodedStep(array("q", ints), array("f", floats), errors)


def decode(
    ints: Sequence[int], floats: Sequence[float] = (), errors: Sequence[str] = ()
) -> list[StepItem]:
    """Decode a step, fastest from a list; raises E2104 with an excerpt of what is malformed."""
    items: list[StepItem] = []
    values = ints if type(ints) is list else list(ints)
    size, at, float_at, error_at = len(values), 0, 0, 0
    start = 0
    new, add = tuple.__new__, items.append  # a third of what calling StepItem costs
    try:
        while at < size:
            start = at
            first = at + _HEAD
            handle, sequence, offset, end, count, width = values[at:first]
            at = first + count
            if count < 0 or at > size or not 0 <= end <= ERROR:
                raise ValueError
            ids = values[first:at]
            if not width and end != ERROR:
                add(new(StepItem, (handle, sequence, offset, ids, [], end, None, 0, ())))
                continue
            alternatives: Sequence[int] = ()
            log_probs: list[float] = []
            error: str | None = None
            if width:
                of_ids = at
                at += count * (width - 1)
                float_end = float_at + (width if sequence == EMBEDDING else count * width)
                if width < 0 or at > size or float_end > len(floats):
                    raise ValueError
                alternatives = values[of_ids:at] or ()
                log_probs = list(floats[float_at:float_end])
                float_at = float_end
            if end == ERROR:
                error = errors[error_at]
                error_at += 1
            made = (handle, sequence, offset, ids, log_probs, end, error, width, alternatives)
            add(new(StepItem, made))
    except (ValueError, TypeError, IndexError):
        raise _malformed(values, start, at) from None
    if float_at != len(floats) or error_at != len(errors):
        raise TritonMalformedEvent(
            f"a step has {len(floats)} log probabilities and {len(errors)} errors;"
            f" its items have {float_at} and {error_at}"
        )
    return items


def merge(items: Iterable[StepItem]) -> list[StepItem]:
    """Coalesce consecutive items of each sequence, in the order in which these first came.

    Items that do not follow each other, or have log probabilities of another width, stay apart.
    """
    merged: list[StepItem] = []
    places: dict[tuple[int, int], int] = {}
    for item in items:
        key = item.handle, item.sequence
        place = places.get(key)
        if place is not None and (joined := _joined(merged[place], item)) is not None:
            merged[place] = joined
        else:
            places[key] = len(merged)
            merged.append(item)
    return merged


def _joined(one: StepItem, other: StepItem) -> StepItem | None:
    if one.end != GOES_ON or one.offset + len(one.ids) != other.offset:
        return None
    if one.width != other.width and one.ids and other.ids:
        return None
    return StepItem(
        one.handle,
        one.sequence,
        one.offset,
        one.ids + other.ids,
        one.log_probs + other.log_probs,
        other.end,
        other.error,
        one.width if one.ids else other.width,
        [*one.alternatives, *other.alternatives] or (),
    )


def _malformed(values: Sequence[Any], start: int, end: int) -> TritonMalformedEvent:
    stop = min(max(end, start + _HEAD), start + _EXCERPT)
    excerpt = ", ".join(str(value)[:24] for value in values[start:stop])
    return TritonMalformedEvent(
        f"a step of {len(values)} numbers is malformed at {start}: [{excerpt}, ...]"
    )
