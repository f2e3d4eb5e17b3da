"""A standby engine takes over from one that is killed: it sleeps, wakes, and no stream is lost."""

from __future__ import annotations

import re
from pathlib import Path

import gpu_models
import pytest
from gpu_servers import PATIENCE_S, Card, Server, drawn, of_bytes, served
from gpu_streams import GREEDY, Streams, completion
from stack import wait_until

pytestmark = pytest.mark.gpu

WEIGHTS_GB = 5.6
_OF_SPARE = r"spare engine(?: \d+ is parked:| \d+| any more:|:) (.*)"


def test_a_sleeping_standby_takes_over_twice(card: Card, smollm2: Path, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    if card.rehearsal:
        of_bytes(engine)
    else:
        gpu_models.made_up(smollm2, engine, card.arguments(WEIGHTS_GB))
    variables = {"RESUME": "1", "SPARE_ENGINE": "1", **drawn(card)}
    asked = [completion(number, GREEDY) for number in range(64)]
    with served(Server(tmp_path / "work", engine, card, **variables)) as server:
        streams = Streams(server, asked)
        for number in (1, 2):
            said = wait_until(lambda n=number: re.findall(_OF_SPARE, server.output)[n - 1 :], 180)
            assert said[0].startswith("asleep"), said
            streams.kill(0.3)
        wait_until(lambda: server.health() == "READY", PATIENCE_S)
