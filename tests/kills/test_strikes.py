"""A process of the server dies or stops amid streams: every stream is whole, or ends as promised.

The strikes and the ledger are those of `make faults`, which has more ways, processes and engines.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from faults import engines, processes
from faults.runner import struck
from faults.strikes import Strike
from faults.target import Target, served
from layers import full
from stack import note_start

pytestmark = pytest.mark.integration

STREAMS = 12
STOPPED_S = 120
"""At most: the server ends a process that is stopped."""
CUT = {"cut off": ["predictions", "v1", "v2"]}
FAILED = {"E2105": ["predictions"]}
LASTING = ("engine", "tritonserver", "server", "cog")


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """A server of the mock, which every test strikes and finds READY."""
    note_start("faults: mock")
    with engines.prepared("mock") as start, served(start, boxed=False) as running:
        yield running


@pytest.mark.parametrize(
    ("fault", "victim", "may_end"),
    [
        ("kill", "engine", {}),
        ("kill", "tritonserver", {}),
        ("kill", "stub", {}),
        ("kill", "server", CUT),
        ("kill", "cog", FAILED),
        ("stop", "worker", FAILED),
        full("stop", "engine", {}),
        full("stop", "reaper of tritonserver", {}),
        full("stop", "server", CUT),
        full("kill", "worker", FAILED),
    ],
)
def test_each_stream_is_whole_or_ends_as_promised(
    target: Target, fault: str, victim: str, may_end: dict[str, list[str]]
) -> None:
    before = processes.by_role(target.pid)
    strike = Strike(fault, victim, lasts=STOPPED_S if fault == "stop" else 0)
    account = struck(target, "mock", strike, STREAMS, may_end)
    assert account.problems == []
    assert account.back_s is not None, target.tail()
    account.held.pop("shared_memory")  # of all servers of this machine
    assert not any(account.held.values()), account.held
    after = processes.by_role(target.pid)
    lost = {"stub": "tritonserver", "worker": "cog", "reaper of tritonserver": "tritonserver"}
    replaced = [role for role in LASTING if before[role] != after[role]]
    assert replaced == [lost.get(victim, victim)]
