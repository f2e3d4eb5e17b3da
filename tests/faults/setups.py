"""Setups of a server: what a scenario asks for beside the engine."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lora_adapters import adapter
from range_server import Content, Fault, Span, serving_file

from cog_triton.engines.openvino import family
from cog_triton.system.paths import triton_model_repo
from faults import clock_faults, sandbox
from faults.engines import Profile
from faults.kinds import ADAPTER, ADAPTER_RANK
from faults.scenario import Setup
from faults.target import Start

_RANKS = Path(__file__).parents[1] / "ranks"
_FAMILY = Path(family.__file__)
_CUT_SHARE, _CUT_AFTER = 0.4, 4 << 20
_BUSY = """
import os
parent = os.getppid()
os.nice(5)
while os.getppid() == parent:
    sum(range(1 << 18))
"""
"""Computes until its parent has gone."""


def why_not(setup: Setup) -> str | None:
    """Why no such server can be started here; None if one can."""
    if setup.ranks > 1:
        return sandbox.lacking() or (None if shutil.which("mpirun") else "no mpirun")
    return clock_faults.lacking() if setup.own_clock else None


@contextmanager
def prepared(profile: Profile, setup: Setup, directory: Path, seed: int) -> Iterator[Start]:
    """How to start a server of this setup; what it needs lasts as long as the block."""
    start = Start(list(profile.arguments), dict(profile.environment))
    if setup.ranks > 1:
        _several_ranks(start, setup.ranks, directory)
    if setup.own_clock:
        start.environment.update(clock_faults.environment(directory))
    if profile.has_adapter:
        adapter(directory / ADAPTER, ADAPTER_RANK)
        config = directory / "serve.yaml"
        config.write_text(f"lora_adapters: {{{ADAPTER}: {ADAPTER}}}")
        start.arguments.append(f"--config={config}")
    with ExitStack() as stack:
        for _ in range(setup.busy):
            child = subprocess.Popen([sys.executable, "-S", "-c", _BUSY])
            stack.callback(child.wait)
            stack.callback(child.kill)
        if setup.cut_download:
            start.arguments[0] = stack.enter_context(_downloads(Path(profile.arguments[0]), seed))
        yield start


@contextmanager
def _downloads(engine: Path, seed: int) -> Iterator[str]:
    """URL of an engine whose connections are cut at random."""
    rng = random.Random(seed)

    def plan(number: int, span: Span | None) -> Fault | None:
        is_cut = number == 1 or rng.random() < _CUT_SHARE
        return Fault(reset_after=rng.randrange(_CUT_AFTER)) if is_cut else None

    with serving_file(Content.of(engine.read_bytes()), plan) as files:
        yield f"{files.url}/{engine.name}"


def _several_ranks(start: Start, ranks: int, directory: Path) -> None:
    """Serve OpenVINO's engine as one of so many ranks, by the model of the tests of ranks.

    No family that runs without a GPU has ranks, so this one's code says so within the sandbox.
    """
    repository = directory / "triton_model_repo"
    shutil.copytree(triton_model_repo(), repository)
    version = repository / "tensorrt_llm" / "1"
    version.mkdir(exist_ok=True)
    # In one file: the server takes over no other of a model.
    world, model = ((_RANKS / name).read_text() for name in ("world.py", "model.py"))
    (version / "model.py").write_text(world + model.replace("from world import World\n", ""))
    code = directory / "family.py"
    code.write_text(f"{_FAMILY.read_text()}\nOpenVINOFamily.world_size = {ranks}\n")
    start.binds.update({repository: triton_model_repo(), code: _FAMILY})
    start.environment.update(WORLD_SIZE=str(ranks), COG_TRITON_SKIP_PREFLIGHT="1")
