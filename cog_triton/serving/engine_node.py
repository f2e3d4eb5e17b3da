"""``cog-triton serve --node-rank N``: a node that computes for the server of another node."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cog_triton.engines.vllm.family import VLLMFamily
from cog_triton.engines.vllm.model_directory import read_model
from cog_triton.engines.vllm.nodes import (
    LEADER,
    STARTED,
    STOPPED,
    Hello,
    NodeLink,
    Nodes,
    fingerprint,
    join,
    nodes_of,
    unreachable,
)
from cog_triton.engines.vllm.vllm_version import ALLOW_UNTESTED, installed_version
from cog_triton.errors import CogTritonError, InvalidArgument, VLLMUnknownError
from cog_triton.serving import memory_check
from cog_triton.serving.engine_preparation import open_configured
from cog_triton.settings import Settings
from cog_triton.system import isolated_python, reaper
from cog_triton.system.process_state import stopped, with_descendants
from cog_triton.system.work_dir import fresh_run_dir
from cog_triton.triton.model_repository import ENGINE_MODEL

_PROGRAM = "cog_triton.engines.vllm.node_process"
_POLL_S, _STOP_S = 0.1, 10.0
_LOOKS = 10  # polls from one look at all processes to the next
_AT_ONCE_S = 1.0
_ALIVE_S = 1.0
ALIVE = "node-alive"
"""File of the work directory that a node touches each second, for liveness probes (deploy/helm)."""


def serve_node(settings: Settings, echo: Callable[[str], None]) -> None:
    """Compute for the leader's engines, one after the other, until the leader stops.

    An engine that dies is loaded again by the leader, and this node joins it anew. Returns at
    SIGTERM or Ctrl-C, and when the leader's server has stopped.

    Raises:
        InvalidArgument: the model is of one node, or the rank or the leader's address is wrong.
        EngineIncompatible: the leader has another version or another model.
        TritonUnavailable: the leader could not be reached, or hung up at once, for
            TRITON_START_TIMEOUT seconds.
        VLLMUnknownError: vLLM's workers ended here, which ends the leader's engine.
    """
    _Node(settings, echo).run()


@dataclass
class _Node:
    settings: Settings
    echo: Callable[[str], None]
    _stop_asked: bool = field(default=False, init=False)
    _said_alive_at: float = field(default=-math.inf, init=False)
    _linked_at: float = field(default_factory=time.monotonic, init=False)

    def run(self) -> None:
        rank = self.settings.lws_worker_index
        assert rank
        family, config = asyncio.run(open_configured(self.settings))
        if not isinstance(family, VLLMFamily) or family.nodes == 1:
            raise InvalidArgument(
                f"--node-rank={rank} (LWS_WORKER_INDEX): {family.directory} is no model of vLLM for"
                " several nodes: its model.json has no nnodes"
            )
        options = config.arguments_of(ENGINE_MODEL)
        python = str(options.get("engine_python") or "")
        version = installed_version(python)
        model = read_model(family.directory, version)
        nodes = nodes_of(model.arguments, options.get(LEADER))
        if rank >= nodes.count:
            raise InvalidArgument(
                f"--node-rank={rank} (LWS_WORKER_INDEX): must be below nnodes={nodes.count}"
            )
        memory_check.require_memory(self.settings, family, alone=True)
        hello = Hello(rank, version, fingerprint(model))
        untested = str(options.get(ALLOW_UNTESTED, "")).lower() == "true"
        parameters = {name: str(value) for name, value in options.items()}
        given = {"allow_untested": untested, "parameters": parameters}
        self._begin(family.directory, python, given)
        handlers = {number: signal.signal(number, self._stop)
                    for number in (signal.SIGTERM, signal.SIGINT)}  # fmt: skip
        try:
            self.echo(f"Node {rank} of {nodes.count}, of the leader {nodes.address}")
            while self._join_once(nodes, hello):
                pass
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _begin(self, directory: Path, python: str, given: Mapping[str, Any]) -> None:
        """Prepare the command of the workers, but for what the leader decides."""
        self._given = {"engine_dir": str(directory.resolve()), **given}
        run_dir = fresh_run_dir(self.settings.work_dir)
        self._environment = isolated_python.environment(run_dir / "python") if python else None
        self._python = python or sys.executable

    def _stop(self, *_: object) -> None:
        self._stop_asked = True

    def _stopped(self) -> bool:
        """Whether this node is to stop; a liveness probe reads when that was asked last."""
        if (now := time.monotonic()) - self._said_alive_at > _ALIVE_S:
            self._said_alive_at = now
            (self.settings.work_dir / ALIVE).touch()
        return self._stop_asked

    def _join_once(self, nodes: Nodes, hello: Hello) -> bool:
        """Join one engine and compute for it; whether there may be another."""
        patience_s = self.settings.triton_start_timeout
        link = join(nodes, hello, patience_s, self._stopped)
        if link is None:
            return False
        began, error = time.monotonic(), "it was stopped"
        try:
            told = self._hear(link)
            if told == STARTED:
                self.echo("Joined; vLLM's workers start")
                told = self._compute(link, hello.rank)
        except CogTritonError as reason:
            error = str(reason)
            raise
        finally:
            link.close(error)
        if told == STOPPED:
            self.echo("The leader has stopped")
        if told == "":
            self._wait_for_next(nodes, lasted_s=time.monotonic() - began)
        return told == ""

    def _wait_for_next(self, nodes: Nodes, lasted_s: float) -> None:
        """The link has ended: a leader, or a proxy, that hangs up at once is as good as none."""
        if lasted_s > _AT_ONCE_S:
            self._linked_at = time.monotonic()
            self.echo("The leader's engine has ended; waiting for the next one")
            return
        if time.monotonic() - self._linked_at > (patience_s := self.settings.triton_start_timeout):
            raise unreachable(nodes, patience_s)
        time.sleep(_AT_ONCE_S)

    def _hear(self, link: NodeLink) -> str | None:
        """What the leader says next, or None once this node is to stop."""
        while not self._stopped():
            if (told := link.heard(_POLL_S)) is not None:
                return told
        return None

    def _compute(self, link: NodeLink, rank: int) -> str | None:
        """Run the workers until the leader says something, hangs up, or this node is to stop."""
        given = {**self._given, "rank": rank, "leader": link.leader, "address": link.address}
        command = [self._python, "-m", _PROGRAM, json.dumps(given)]
        workers = reaper.spawn(command, env=self._environment)
        looks = itertools.count()
        try:
            while not self._stopped():
                if (told := link.heard(_POLL_S)) is not None:
                    return told
                below = with_descendants(workers.process.pid) if next(looks) % _LOOKS == 0 else ()
                if (one := stopped(below)) is not None:
                    raise VLLMUnknownError(f"node {rank}: process {one} of vLLM's was stopped")
                if (code := workers.poll()) is not None:
                    raise VLLMUnknownError(
                        f"node {rank}: vLLM's workers ended with code {code}; the lines above say"
                        " why"
                    )
            workers.terminate()
            with suppress(subprocess.TimeoutExpired):
                workers.wait(_STOP_S)
        finally:
            workers.kill()
        return None
