"""A spare engine that sleeps, as it takes over from a server's engine that is killed."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import killed_worker
import models
from killed_worker import UnderStreams
from results import Phase
from servers import Ours, running

if TYPE_CHECKING:
    from verify import Driver

BUDGETS = {"park": 300}
LEAST = {"park": 60}
_SPARE_S = 150.0  # a load of 55 s, also if nothing is compiled
_OF_SPARE = r"spare engine(?: \d+ is parked:| \d+| any more:|:) (.*)"


class Parking:
    """Phase `park`: one GPU, a server with a spare and one without."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def phases(self) -> dict[str, Callable[[Phase], None]]:
        """What each phase runs."""
        return {"park": self.park}

    def park(self, phase: Phase) -> None:
        """Kill the engine of each server under streams, twice with a spare."""
        layers = self._driver.options.layers or 32
        shape = {**models.SHAPE, "num_hidden_layers": layers}
        given = {**models.TWO_ENGINES, **self._driver.extra}
        directory = self._driver.root / "models" / f"park-{layers}"
        model = models.large(directory, self._driver.small, given, shape)
        for name, kills in (("spare", 2), ("no-spare", 1)):
            spare = {"SPARE_ENGINE": "1"} if name == "spare" else {}
            environment = {**self._driver.environment, "RESUME": "1", **spare}
            server = self._driver.ours(f"park-{name}", model, END_ID="-1", **environment)
            with running(server):
                self._driver.put_start(phase, server)
                streams = UnderStreams(server, model, self._driver.until)
                phase.put(f"{name}: undisturbed", streams.undisturbed)
                for number in range(1, kills + 1):
                    self._kill(phase, name, number, server, streams)

    def _kill(
        self, phase: Phase, name: str, number: int, server: Ours, streams: UnderStreams
    ) -> None:
        if name == "spare":
            said: list[str] = []
            until = time.monotonic() + min(_SPARE_S, self._driver.until - time.monotonic() - 30)
            while len(said) < number and time.monotonic() < until:
                said = re.findall(_OF_SPARE, server.log.read_text("utf-8", "replace"))
                time.sleep(0.5)
            asleep = len(said) >= number and said[-1].startswith("asleep")
            phase.check(f"{name} {number}: the spare is asleep", asleep, said)
        row = streams.kill(*killed_worker.victim(server, ()))
        phase.add(f"{name}: returns", {"number": number, **row})
        streams.check(phase, f"{name} {number}", row)
