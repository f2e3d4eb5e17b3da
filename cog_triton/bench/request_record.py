"""Record of one request: times, token counts and outcome."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

OK, FAILED, CUT = "ok", "failed", "cut"


@dataclass(slots=True)
class Record:
    """One request; times in seconds of the monotonic clock, which all processes share.

    `times` has each read that brought output, and `counts` how many pieces of it; a piece is an
    event, or a token where the target tells tokens apart. `output_tokens` are as the server counts
    them, and `server` is what else it told. A request that the user's Ctrl-C ended is ``cut``: it
    neither failed nor succeeded.
    """

    index: int
    scheduled: float
    wanted_tokens: int | None = None
    sent: float = 0.0
    ended: float = 0.0
    status: str = CUT
    code: str = ""
    error: str = ""
    times: array[float] = field(default_factory=lambda: array("d"))
    counts: array[int] = field(default_factory=lambda: array("l"))
    input_tokens: int | None = None
    output_tokens: int | None = None
    server: dict[str, float] = field(default_factory=dict)

    def output(self, at: float, pieces: int) -> None:
        """Record a read with `pieces` pieces of output."""
        self.times.append(at)
        self.counts.append(pieces)

    def fail(self, code: str, error: str) -> None:
        """Record a failure."""
        self.status, self.code, self.error = FAILED, code, error[:500]

    @property
    def pieces(self) -> int:
        """Number of pieces of output."""
        return sum(self.counts)

    @property
    def latency(self) -> float:
        """E2E latency: from when it was due to the answer's end."""
        return self.ended - self.scheduled

    @property
    def service(self) -> float:
        """E2E latency from sending."""
        return self.ended - self.sent

    @property
    def ttft(self) -> float | None:
        """TTFT: from when it was due to the first output; None for answers that came whole."""
        return self.times[0] - self.scheduled if self.times else None

    @property
    def ttft_sent(self) -> float | None:
        """TTFT from sending; None for answers that came whole."""
        return self.times[0] - self.sent if self.times else None

    @property
    def tpot(self) -> float | None:
        """TPOT: seconds for each output token after the first, (E2E - TTFT) / (n - 1).

        None where one read brought all of the output, which says nothing of its rate.
        """
        if not self.times or self.times[-1] <= self.times[0]:
            return None
        if self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.ended - self.times[0]) / (self.output_tokens - 1)

    @property
    def single_stream_tps(self) -> float | None:
        """Output tokens a second, from sending to the end."""
        if self.output_tokens is None or self.service <= 0:
            return None
        return self.output_tokens / self.service

    def gaps(self) -> list[float]:
        """ITL: seconds between pieces; those of one read are 0 apart."""
        found: list[float] = []
        before: float | None = None
        for at, count in zip(self.times, self.counts, strict=True):
            if before is not None:
                found.append(at - before)
            found += [0.0] * (count - 1)
            before = at
        return found
