"""One engine on two nodes, each in a network namespace of its own where that is allowed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from stack import processes_of, wait_until
from test_vllm_resume import TOKENS, completion, prompt_of
from vllm_stack import VLLMStack

from cog_triton.system.ports import free_ports

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
import namespaces

pytestmark = pytest.mark.integration


class Nodes:
    """A leader, and a node that computes for it."""

    def __init__(self, directory: Path, leader: str, entered: Any) -> None:
        self.leader = VLLMStack(
            directory,
            loras=False,
            SERVED_MODEL_NAME="any",
            VLLM_DOUBLE_DELAY="0.003",
            LWS_LEADER_ADDRESS=leader,
            LWS_WORKER_INDEX="0",
        )
        model = directory / "engine" / "model.json"
        arguments = json.loads(model.read_text())
        (port,) = free_ports(1)
        parallel = {"tensor_parallel_size": 2, "nnodes": 2, "master_port": min(port, 60000)}
        model.write_text(json.dumps(arguments | parallel))
        self.log = directory / "node.out"
        self.work_dir = directory / "node-work"
        self._entered = entered
        self._started: list[subprocess.Popen[bytes]] = []

    def start_node(self, engine: Path | None = None, **environment: str) -> subprocess.Popen[bytes]:
        *command, served = self.leader.command
        given = {
            **self.leader.environment,
            "COG_TRITON_WORK_DIR": str(self.work_dir),
            "LWS_WORKER_INDEX": "1",
            **environment,
        }
        with self._entered(), self.log.open("ab") as log:
            node = subprocess.Popen(
                [*command, str(engine or served)], env=given, stdout=log, stderr=log
            )
        self._started.append(node)
        return node

    def told(self) -> str:
        return " ".join(self.log.read_text().split())

    def close(self) -> None:
        for node in self._started:
            node.kill()  # its reapers end what it started
            node.wait()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    @contextmanager
    def networks() -> Iterator[tuple[str, Any]]:
        if os.geteuid():
            yield "127.0.0.1", nullcontext
            return
        with namespaces.two_namespaces() as (first, second), namespaces.inside(first):
            yield namespaces.ADDRESSES[0], lambda: namespaces.inside(second)

    with networks() as (leader, entered):
        made = Nodes(tmp_path, leader, entered)
        try:
            yield made
        finally:
            made.close()


def test_a_stream_outlives_the_node_that_computes_for_it(nodes: Nodes, tmp_path: Path) -> None:
    twin = tmp_path / "twin"
    twin.mkdir()
    arguments = json.loads((tmp_path / "engine" / "model.json").read_text())
    (twin / "model.json").write_text(json.dumps(arguments | {"seed": 7}))
    text = ""
    nodes.leader.start()
    with closing(nodes.leader):
        assert nodes.start_node(twin).wait(60) == 1  # while the leader waits
        node = nodes.start_node()
        nodes.leader.until_ready()
        assert "error: E1305 EngineIncompatible: node 1" in nodes.told()
        assert "its model.json or model is not that of the leader" in nodes.told()
        lines = processes_of(nodes.work_dir).values()
        (workers,) = (x for x in lines if "node_process" in x and "reaper.py" not in x)
        assert '"rank": 1' in workers
        stream = completion(nodes.leader, 1)
        while len(text) < 50:
            text += next(stream)
        node.kill()
        node.wait()
        node = nodes.start_node()
        text += "".join(stream)
        assert text == (prompt_of(1) * TOKENS)[:TOKENS]
        assert nodes.leader.finish(signal.SIGTERM)[0] == 0
    assert node.wait(60) == 0
    assert nodes.told().endswith("The leader has stopped")
    assert not processes_of(nodes.work_dir)


def test_a_node_without_a_leader_ends(nodes: Nodes) -> None:
    node = nodes.start_node()
    late = nodes.start_node(TRITON_START_TIMEOUT="0.5")
    assert late.wait(60) == 1
    assert "E2105 TritonUnavailable: the leader" in nodes.told()
    wait_until(lambda: nodes.told().count("Node 1 of 2") == 2)
    node.send_signal(signal.SIGTERM)
    assert node.wait(60) == 0
