"""Two GPUs: one engine on both, and one engine on each, under the kill of one of its processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gpu_models
import pytest
from gpu_servers import PATIENCE_S, Card, Server, drawn, of_bytes, served
from gpu_streams import GREEDY, Streams, completion
from stack import wait_until

pytestmark = pytest.mark.gpu

WEIGHTS_GB = 5.6
ASKED = [completion(number, GREEDY) for number in range(64)]


def engine(directory: Path, smollm2: Path, card: Card, **arguments: Any) -> Path:
    if card.rehearsal:
        return of_bytes(directory)
    return gpu_models.made_up(smollm2, directory, card.arguments(WEIGHTS_GB, **arguments))


@pytest.mark.parametrize(
    "arguments",
    [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}],
    ids=lambda given: next(iter(given)),
)
def test_a_killed_worker_of_two_gpus_loses_no_stream(
    two_gpus: Card, smollm2: Path, tmp_path: Path, arguments: Mapping[str, Any]
) -> None:
    model = engine(tmp_path / "engine", smollm2, two_gpus, **arguments)
    variables = {"RESUME": "1", **drawn(two_gpus)}
    with served(Server(tmp_path / "work", model, two_gpus, **variables)) as server:
        chosen = [line for line in server.logs().splitlines() if "all-reduce backends" in line]
        assert not [line for line in chosen if "SYMM" in line or "FLASHINFER" in line]
        streams = Streams(server, ASKED)
        streams.kill(0.3)
        wait_until(lambda: server.health() == "READY", PATIENCE_S)


def test_one_of_two_engines_dies_and_the_server_stays_ready(
    two_gpus: Card, smollm2: Path, tmp_path: Path
) -> None:
    model = engine(tmp_path / "engine", smollm2, two_gpus)
    variables = {"RESUME": "1", "ENGINE_REPLICAS": "2", **drawn(two_gpus)}

    def both_serve() -> bool:
        assert server.health() == "READY"
        return server.metric_values()["cog_triton_engines"] == 2

    with served(Server(tmp_path / "work", model, two_gpus, **variables)) as server:
        wait_until(both_serve, PATIENCE_S)
        Streams(server, ASKED).kill(0.3)
        wait_until(both_serve, PATIENCE_S)
