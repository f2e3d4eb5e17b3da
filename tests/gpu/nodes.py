"""One engine on two nodes: two network namespaces of this machine, with a GPU each.

Started as the pods of deploy/leaderworkerset-vllm.yaml, by its commands and LeaderWorkerSet's
variables. NCCL goes by TCP between the two, so what is measured is that way, not a network.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bench
import models
import multicast
import namespaces
import prompts
import yaml
from arguments import REPOSITORY
from endpoints import Endpoint
from killed_worker import UnderStreams
from results import Phase
from servers import Ours, Server, stopped_at_the_end

if TYPE_CHECKING:
    from verify import Driver

BUDGETS = {"nodes": 570}
LEAST = {"nodes": 120}
_MANIFEST = REPOSITORY / "deploy" / "leaderworkerset-vllm.yaml"
_LAYERS = 8
_VARIANTS = {
    "tensor parallel": "tensor_parallel_size",
    "pipeline parallel": "pipeline_parallel_size",
}
_VARIANT_S, _KILL_S, _RESTART_S = 170, 110, 1.0
_GREEDY, _AT_ONCE = 8, 64
# Between machines there is no other way than by network; each has its own name for NCCL.
_NCCL = {
    **dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"), "1"),
    "NCCL_NET": "Socket",
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,NET",
}
_BY_SOCKET = re.compile(r"via (NET/Socket)")


class Pod(threading.Thread):
    """A node that is started again whenever it ends, in a network and a /dev/shm of its own."""

    def __init__(self, node: Server, namespace: int | None) -> None:
        super().__init__(name="pod", daemon=True)
        self.node = node
        self.starts = 0
        self.failure: OSError | None = None
        self._namespace = namespace
        self._stopping = threading.Event()

    def run(self) -> None:
        try:
            namespaces.own_shared_memory()
        except OSError as error:
            self.failure = error
            return
        with ExitStack() as stack:
            if self._namespace is not None:
                stack.enter_context(namespaces.inside(self._namespace))
            while not self._stopping.is_set():
                self.starts += 1
                self.node.log = self.node.log.with_name(f"node-{self.starts}.log")
                self.node.launch()
                assert self.node.process is not None
                self.node.process.wait()
                self._stopping.wait(_RESTART_S)

    def close(self) -> None:
        """Stop the node, and start it no more."""
        self._stopping.set()
        while self.is_alive():  # it may be about to start once more
            self.node.stop()
            self.join(_RESTART_S)


class TwoNodes:
    """Phase `nodes`: two GPUs, tensor parallel and pipeline parallel."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._leader = "127.0.0.1"
        self._second: int | None = None

    def phases(self) -> dict[str, Callable[[Phase], None]]:
        """What each phase runs."""
        return {"nodes": self.nodes}

    def nodes(self, phase: Phase) -> None:
        """Two nodes beside one; a kernel without namespaces or veth has them in one network."""
        with ExitStack() as stack:
            try:
                first, self._second = stack.enter_context(namespaces.two_namespaces())
                stack.enter_context(namespaces.inside(first))
                self._leader = namespaces.ADDRESSES[0]
            except OSError as error:
                phase.put("refused", f"{error}; both nodes are in the machine's own network")
                print(f"  refused: {phase.seen['refused']}", flush=True)
            for name, argument in _VARIANTS.items():
                if (left := self._driver.until - time.monotonic()) < _VARIANT_S and phase.samples:
                    phase.put(f"{name}: not run", f"{left:.0f} s left")
                    break
                self._variant(phase, name, {argument: 2})

    def _variant(self, phase: Phase, name: str, parallel: Mapping[str, int]) -> None:
        one = self._driver.ours(f"nodes-{name[:4]}-one", self._model(name, parallel), END_ID="-1")
        leader, pod = self._pair(name, {**parallel, "nnodes": 2})
        with self._running(pod), stopped_at_the_end(one, leader):
            leader.launch()
            one.launch()
            leader.wait()
            one.wait()
            if pod.failure:
                raise pod.failure
            for server in (one, leader):
                self._driver.put_start(phase, server)
            for server in (one, leader, pod.node):
                wrong = multicast.left_on(server)
                if not phase.check(f"{server.name}: NVLink multicast is off", not wrong, wrong):
                    raise RuntimeError("NVLink multicast must be off: nothing more is run")
            if not self._driver.rehearsal:
                ways = sorted({*_BY_SOCKET.findall(leader.tail(200_000))})
                phase.check(f"{name}: NCCL goes by sockets", ways == ["NET/Socket"], ways)
            endpoints = [
                (Endpoint(f"{name}, one node", one.openai), one),
                (Endpoint(f"{name}, two nodes", leader.openai), leader),
            ]
            model = self._model(name, parallel)
            self._same(phase, name, model, [endpoint for endpoint, _ in endpoints])
            self._measure(phase, model, endpoints)
            one.stop()
            self._kills(phase, name, leader, pod, model)

    def _model(self, name: str, parallel: Mapping[str, int]) -> Path:
        layers = self._driver.options.layers or _LAYERS
        arguments = {**models.TWO_ENGINES, **parallel, **self._driver.extra}
        shape = {**models.SHAPE, "num_hidden_layers": layers}
        nodes = parallel.get("nnodes", 1)
        directory = self._driver.root / "models" / f"nodes-{name[:4]}-{nodes}"
        return models.large(directory, self._driver.small, arguments, shape)

    def _pair(self, name: str, parallel: Mapping[str, int]) -> tuple[Ours, Pod]:
        """The leader, which is started from this thread's namespace, and the other node."""
        group = next(
            item["spec"]["leaderWorkerTemplate"]
            for item in yaml.safe_load_all(_MANIFEST.read_text("utf-8"))
            if item["kind"] == "LeaderWorkerSet"
        )
        model = self._model(name, parallel)
        given = {
            **_NCCL,
            "COG_WEIGHTS": str(model),
            "LWS_LEADER_ADDRESS": self._leader,
            "LWS_GROUP_SIZE": "2",
            "END_ID": "-1",
            "RESUME": "1",
        }
        words = [_arguments(group[kind]) for kind in ("leaderTemplate", "workerTemplate")]
        leader = self._driver.ours(f"nodes-{name[:4]}-two", model, **given, **_of_node(0))
        leader.command = words[0]
        environment = {**leader.environment, **_of_node(1)}
        environment["COG_TRITON_WORK_DIR"] += "-node"
        for number, its in enumerate((leader.environment, environment)):
            # Another machine has a disk of its own.
            its["VLLM_CACHE_ROOT"] = str(self._driver.root / f"vllm-cache-node-{number}")
        log = leader.log.with_name("node.log")
        return leader, Pod(Server("node", words[1], environment, log, ""), self._second)

    @contextmanager
    def _running(self, pod: Pod) -> Iterator[None]:
        pod.start()
        try:
            yield
        finally:
            pod.close()

    def _same(self, phase: Phase, name: str, model: Path, asked: Sequence[Endpoint]) -> None:
        texts = prompts.make(model, _GREEDY, bench.INPUT_TOKENS, seed=99)
        alone, spread = (bench.greedy(endpoint, texts, 64) for endpoint in asked)
        same = sum(a == b for a, b in zip(alone, spread, strict=True))
        phase.put(f"{name}: same greedy texts", f"{same} of {_GREEDY}")
        told = f"{name}: {_GREEDY} greedy answers as of one node"
        phase.check(told, same == _GREEDY, (same, alone[:1], spread[:1]))

    def _measure(
        self, phase: Phase, model: Path, endpoints: Sequence[tuple[Endpoint, Server]]
    ) -> None:
        texts = prompts.make(model, 512, bench.INPUT_TOKENS)
        asked = [(endpoint, server.processes) for endpoint, server in endpoints]
        measured = bench.Bench(asked, texts, phase.add_sample)
        measured.warm_up(_AT_ONCE)
        measured.round(0, [1, _AT_ONCE], self._driver.until)
        phase.put("medians", bench.medians(phase.samples))
        phase.put("cores", bench.cores_by_process(phase.samples))
        wrong = [error for row in phase.samples for error in row["errors"]]
        phase.check("every answer had all of its tokens", not wrong, wrong[:2])

    def _kills(self, phase: Phase, name: str, leader: Ours, pod: Pod, model: Path) -> None:
        """`kill -9` of the other node, then of a worker of vLLM on it; it is started again."""
        if self._driver.until - time.monotonic() < _KILL_S:
            phase.put(f"{name}: kills", "no time left")
            return
        streams = UnderStreams(leader, model, self._driver.until)
        phase.put(f"{name}: undisturbed", streams.undisturbed)
        rehearsed = "our node of vLLM" if self._driver.rehearsal else "vLLM worker"
        for role in ("cog-triton serve", rehearsed):
            found = [pid for pid, its in pod.node.processes().items() if its == role]
            left = self._driver.until - time.monotonic()
            if left < _KILL_S or not found:
                phase.put(f"{name}: {role} not killed", f"{left:.0f} s left, {len(found)} found")
                continue
            starts = pod.starts
            row = streams.kill(f"{role} of the other node", max(found))
            phase.add(f"{name}: returns", row)
            again = streams.check(phase, f"{name}, {role}", row)
            phase.check(f"{name}, {role}: the node was started again", pod.starts == starts + 1)
            if not again:
                return


def _arguments(template: Mapping[str, Any]) -> list[str]:
    """The command of a pod's container, by the Python that this is."""
    program, *words = template["spec"]["containers"][0]["args"]
    assert program == "cog-triton"
    return [sys.executable, "-m", "cog_triton", *words]


def _of_node(number: int) -> dict[str, str]:
    """What differs between the nodes."""
    return {
        "LWS_WORKER_INDEX": str(number),
        "NCCL_HOSTID": namespaces.NAMES[number],
        "CUDA_VISIBLE_DEVICES": str(number),
    }
