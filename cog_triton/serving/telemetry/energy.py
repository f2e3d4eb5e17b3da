"""Energy of the GPUs, by NVML's counters, shared over the tokens of the requests that used it.

Twice a second the counters' increase is shared: what an idle GPU would have used in that time
apart, the rest over all tokens that were read or made, each the same. A request that ends is given
the share of its last tokens by the last rate at once; the next interval makes up for the
difference, so that all shares add up to what the counters say.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from cog_triton.serving.fair_queue import Queued

_PERIOD_S = 0.5


def _tokens(request: Queued) -> int:
    """Tokens read and made of a request; none of its prompt before the engine has made one."""
    return request.served if request.made() else 0


@dataclass(slots=True)
class _Share:
    tokens: int = 0
    joules: float = 0.0


class EnergyMeter(Collector):
    """Joules of generations and of idle time; thread-safe, and a collector of their metric."""

    def __init__(
        self,
        read: Callable[[], float],
        running: Callable[[], Iterable[Queued]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read` gives the joules that the GPUs have used so far, `running` who uses them."""
        self._read, self._running, self._clock = read, running, clock
        self._counter, self._at = read(), clock()
        self._shares: dict[Queued, _Share] = {}
        self._lock = threading.Lock()
        self._idle_watts: float | None = None
        self._rate = 0.0
        self._ended_tokens = 0
        self._given = 0.0  # to requests that have ended since the last interval
        self._owed = 0.0  # of earlier intervals, to those of the next one; below 0 was too much
        self._closed = threading.Event()
        self.generation = 0.0
        """Joules beyond an idle GPU's while there were requests."""
        self.idle = 0.0
        """Joules of the rest."""

    def start(self) -> None:
        """Share what is used from now on, in a thread that `close` ends."""
        threading.Thread(target=self._run, name="energy", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(_PERIOD_S):
            self.share()

    def share(self) -> None:
        """Share what was used since the last call."""
        with self._lock:
            counter, now = self._read(), self._clock()
            spent, seconds = max(0.0, counter - self._counter), now - self._at
            self._counter, self._at = counter, now
            live = list(self._running())
            fresh = {one: _tokens(one) - self._share(one).tokens for one in live}
            tokens = sum(fresh.values()) + self._ended_tokens
            if not live and not tokens:
                self.idle += spent
                if seconds > 0:
                    watts = spent / seconds
                    self._idle_watts = min(watts, self._idle_watts or watts)
                return
            idle = min(spent, (self._idle_watts or 0.0) * seconds)
            self.idle += idle
            self.generation += spent - idle
            self._divide(spent - idle + self._owed, fresh, tokens)

    def _divide(self, joules: float, fresh: dict[Queued, int], tokens: int) -> None:
        left = joules - self._given
        if tokens:
            self._rate = max(0.0, joules) / tokens
        for_live = sum(fresh.values())
        if for_live and left > 0:
            for one, count in fresh.items():
                self._share(one).joules += left * count / for_live
            left = 0.0
        for one, count in fresh.items():
            self._share(one).tokens += count
        self._owed, self._given, self._ended_tokens = left, 0.0, 0

    def settle(self, request: Queued) -> float:
        """The joules of a request that has ended, which is to be called once for each."""
        with self._lock:
            share = self._shares.pop(request, None) or _Share()
            tokens = max(0, _tokens(request) - share.tokens)
            bill = tokens * self._rate
            self._ended_tokens += tokens
            self._given += bill
            return share.joules + bill

    def collect(self) -> Iterable[Metric]:
        """See `prometheus_client.registry.Collector`."""
        name = "cog_triton_gpu_energy_joules"
        told = "Joules that the GPUs have used: for generations, and what they would have idle"
        family = CounterMetricFamily(name, told, labels=["part"])
        family.add_metric(["generation"], self.generation)
        family.add_metric(["idle"], self.idle)
        yield family

    def _share(self, request: Queued) -> _Share:
        return self._shares.setdefault(request, _Share())
