"""Ledger of a load: every request is opened once, closed once, and accounted for after a strike."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from faults.apis import ENDED, GOOD, HUNG, UNCODED, WRONG, Answer

_ESTABLISHED_S = 0.5
"""A request without text is taken to run once one that was sent so much later has text: by the
clock alone, what a busy machine has not read yet would count."""
SILENCE_S = 0.5
"""A silence of a stream that is longer than this is one that the fault has made."""
_LATER_S = 1.5
"""Such a silence begins so many seconds after the end of the fault, at most."""


class LedgerError(RuntimeError):
    """An answer that was closed twice, or never opened."""


@dataclass
class Account:
    """What became of the streams of one strike; `problems` has a line for each broken promise.

    `flight` is how many ran when it came, `ends` has all outcomes. `back_s` is from the end of the
    fault until READY and all streams flow again, None if never; `held` what the idle server holds
    then beyond what it held before.
    """

    flight: int = 0
    lost: int = 0
    wrong: int = 0
    hung: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    back_s: float | None = None
    held: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Ledger:
    """Requests that run, and those that have ended since the last `account` or `take`."""

    def __init__(self) -> None:
        self.open: dict[Answer, None] = {}
        self.closed: list[Answer] = []
        self._flowing = 0.0

    def begin(self, answer: Answer) -> None:
        """Open an answer that is asked for."""
        self.open[answer] = None

    def end(self, answer: Answer) -> None:
        """Close one; raises LedgerError if it does not run."""
        if answer not in self.open:
            raise LedgerError(f"closed twice, or never opened: {answer}")
        del self.open[answer]
        self.closed.append(answer)

    def take(self) -> list[Answer]:
        """All answers that have ended since the last call."""
        taken, self.closed = self.closed, []
        return taken

    @property
    def established(self) -> list[Answer]:
        """Answers in flight that bring text, or were asked for before another that does."""
        sent = [one.record.sent for one in self.open if one.record.times]
        self._flowing = max([self._flowing, *sent])
        before = self._flowing - _ESTABLISHED_S
        return [one for one in self.open if one.record.times or one.record.sent < before]

    def silence(self, since: float, until: float) -> float:
        """Longest time between `since` and `until` in which a user of streams heard nothing."""
        heard: dict[int, list[float]] = {}
        for one in (*self.closed, *self.open):
            heard.setdefault(one.user, [since, until]).extend(one.record.times)
        spans = (sorted(at for at in times if at >= since) for times in heard.values())
        gaps = (after - before for span in spans for before, after in itertools.pairwise(span))
        return max(gaps, default=until - since)

    def account(
        self, flight: Sequence[Answer], may_end: Mapping[str, Sequence[str]] | None = None
    ) -> Account:
        """Account for the answers that ran at a strike, and all others that have ended since.

        `may_end` has by outcome the APIs, by their path's first part, that may end so.
        """
        may_end = may_end or {}
        found = Account(flight=len(flight))
        begun = set(map(id, flight))
        ended = self.take()
        missing = begun - set(map(id, ended)) - set(map(id, self.open))
        for one in flight:
            if id(one) in missing:
                found.problems.append(f"not accounted for: {one}")
        found.lost += len(missing)
        for one in ended:
            outcome, ours = one.outcome, id(one) in begun or bool(one.record.times)
            if outcome == ENDED and not ours:
                outcome = "E2105"
            is_good = outcome in GOOD or (ours and _first(one) in may_end.get(outcome, ()))
            if outcome == WRONG:
                found.wrong += 1
            elif outcome == HUNG:
                found.hung += 1
            elif not is_good and (ours or outcome == UNCODED):
                found.lost += 1
            if not is_good and (ours or outcome in (WRONG, HUNG, UNCODED)):
                found.problems.append(str(one))
            found.ends[outcome if ours or is_good else f"newcomer: {outcome}"] += 1
        return found


def silent_until(flight: Iterable[Answer], began: float, over: float) -> float:
    """When the last silence ended that a fault from `began` to `over` has made; 0 without one."""
    ends = [0.0]
    for one in flight:
        spans = [
            (after - before, after)
            for before, after in itertools.pairwise(one.record.times)
            if after > began and before < over + _LATER_S and after - before > SILENCE_S
        ]
        ends += [max(spans)[1]] if spans else []
    return max(ends)


def _first(answer: Answer) -> str:
    return answer.kind.api.path.split("/")[1]
