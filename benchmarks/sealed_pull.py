"""Sealed engine from a registry to its directory: whole, with a new seal, and without its weights.

The engine has the shape of one of 8B, whose weights are --scale times as large: shards, and a seal
of 31 MB in 600 files, as vLLM 0.33 left one. It is pushed to docker's registry on this machine and
pulled to a node that has nothing; then with a second seal, to the node that has the first; then as
`weights: reference`, whose weights are compared and linked where they lie. What a network of --gbit
takes is arithmetic: bytes by rate. Needs docker-registry.

    .venv/bin/python benchmarks/sealed_pull.py --scale 0.125
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from _report import Figure, Grid, Report, main, say

from cog_triton.artifact import engine_manifest
from cog_triton.artifact.engine_manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    WeightsReference,
    sha256_of,
)
from cog_triton.artifact.seal import DIRECTORY, Environment, Seal, seal_name
from cog_triton.engines.vllm.sealed_caches import AOT
from cog_triton.oci.engine_pull import Puller
from cog_triton.oci.engine_push import Pushed, push
from cog_triton.oci.reference import Reference
from cog_triton.serving.sealed_engine import with_weights
from cog_triton.settings import Settings

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from local_registry import Registry, running

WEIGHTS, SHARDS = 16_400_000_000, 5
SEALED, KERNELS = 31_000_000, 300
_MODEL = 20_000_000
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Way:
    """Bytes that were fetched or compared, and the seconds of it; `grows` says with the weights."""

    name: str
    sent: int
    fetched: int
    seconds: float
    grows: bool


def environment(gpu: str) -> Environment:
    """That of a seal for a GPU."""
    return Environment(
        vllm="0.33.0", torch="2.14.0", triton="3.8.0", cuda="13.0", python="3.12.11",
        packages="0" * 64, gpu_name=gpu, sm=90, ranks=1,
    )  # fmt: skip


def add_seal(engine: Path, gpu: str, draw: random.Random) -> Seal:
    """Write the files of a seal: a compiled model, and a group of files a kernel."""
    made, key = environment(gpu), f"{draw.getrandbits(256):064x}"
    place = engine / DIRECTORY / seal_name(made)
    files = {f"{AOT}/{key}/rank_0_0/model": _MODEL}
    for number in range(KERNELS):
        files[f"triton/{number:052}/k.cubin"] = (SEALED - _MODEL) // KERNELS
        files[f"triton/{number:052}/k.json"] = 500
    for name, size in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(draw.randbytes(size))
    return Seal(
        environment=made, driver="580.0", aot=[key], compile_seconds=0, seconds=0, apart=False
    )


def describe(engine: Path, seals: list[Seal], weights: WeightsReference | None = None) -> None:
    """Write the manifest of an engine directory."""
    (engine / MANIFEST_NAME).unlink(missing_ok=True)
    files = {name: entry_of(path) for name, path in engine_manifest.files_of(engine).items()}
    manifest = Manifest(
        schema=3, engine="vllm", model_id="me/model-8b", versions={"vllm": "0.33.0"},
        max_input_len=8191, max_seq_len=8192, max_batch_size=256, weights=weights,
        seals={seal_name(one.environment): one for one in seals}, files=files,
    )  # fmt: skip
    (engine / MANIFEST_NAME).write_text(manifest.to_json())


def entry_of(path: Path) -> FileEntry:
    """Size and sum of a file."""
    return FileEntry(size=path.stat().st_size, sha256=sha256_of(path))


def write_model(directory: Path, size: int) -> Path:
    """A model in shards of random bytes, as weights hardly compress."""
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "model.json"):
        (directory / name).write_text("{}")
    for shard in range(SHARDS):
        with (directory / f"model-{shard + 1:05}.safetensors").open("wb") as file:
            draw = random.Random(shard)
            for _ in range(size // SHARDS // (1 << 20)):
                file.write(draw.randbytes(1 << 20))
    return directory


def timed(action: Callable[[], _T]) -> tuple[_T, float]:
    """What an action returns, and its seconds."""
    began = time.perf_counter()
    return action(), time.perf_counter() - began


class Place:
    """A registry, and nodes that pull from it."""

    def __init__(self, registry: Registry, scratch: Path) -> None:
        self.registry, self.scratch = registry, scratch
        self._held: dict[str, set[str]] = {}

    def push(self, engine: Path, tag: str) -> Pushed:
        """Push an engine directory."""
        reference = Reference.parse(f"{self.registry.address}/me/llm:{tag}")
        return push(reference, engine, self.scratch / "push", lambda _: None, threading.Event())

    def pull(self, name: str, pushed: Pushed, node: str, *, grows: bool) -> tuple[Path, Way]:
        """Pull to a node what it has not."""
        layers = self.registry.manifest("me/llm", str(pushed.reference.digest)).json()["layers"]
        held = self._held.setdefault(node, set())
        fetched = sum(layer["size"] for layer in layers if layer["digest"] not in held)
        held |= {layer["digest"] for layer in layers}
        puller = Puller(self.scratch / node, lambda _: None, threading.Event())
        engine, seconds = timed(lambda: puller.pull(pushed.reference))
        say(f"{name}: {fetched / 1e6:.1f} MB in {seconds:.2f} s")
        return engine, Way(name, pushed.sent, fetched, seconds, grows)


def run(args: argparse.Namespace) -> Report:
    """Make the engine, move it in each way, and tell."""
    scale = 0.01 if args.quick else args.scale
    scratch = Path(tempfile.mkdtemp(prefix="cog-triton-bench-", dir=args.dir)).resolve()
    try:
        (scratch / "registry").mkdir()
        with running(scratch / "registry") as registry:
            ways = _moved(Place(registry, scratch), scratch, int(WEIGHTS * scale))
    finally:
        shutil.rmtree(scratch)
    return told(ways, scale, args.gbit)


def _moved(place: Place, scratch: Path, size: int) -> list[Way]:
    draw = random.Random(1)
    engine = write_model(scratch / "engine", size)
    seals = [add_seal(engine, "NVIDIA H200", draw)]
    describe(engine, seals)
    _, whole = place.pull("engine, to a bare node", place.push(engine, "v1"), "node", grows=True)
    seals.append(add_seal(engine, "NVIDIA H100 80GB HBM3", draw))
    describe(engine, seals)
    pushed = place.push(engine, "v2")
    _, seal = place.pull("a new seal, to a node that has it", pushed, "node", grows=False)

    shutil.rmtree(engine / DIRECTORY / seal_name(seals.pop().environment))
    model, entries = scratch / "model", {}
    model.mkdir()
    for path in sorted(engine.glob("*.safetensors")):
        entries[path.name] = entry_of(path)
        path.rename(model / path.name)
    describe(engine, seals, WeightsReference(source=str(model), files=entries))
    pushed = place.push(engine, "reference")
    pulled, bare = place.pull("seal alone, to a bare node", pushed, "bare", grows=False)
    settings = Settings(COG_TRITON_WORK_DIR=str(scratch / "bare"))
    _, seconds = timed(lambda: with_weights(settings, pulled))
    total = sum(entry.size for entry in entries.values())
    linked = Way("its weights, compared and linked", 0, total, seconds, grows=True)
    say(f"{linked.name}: {total / 1e6:.1f} MB in {seconds:.2f} s")
    return [whole, seal, bare, linked]


def told(ways: list[Way], scale: float, gbit: float) -> Report:
    """Table of what ran, and of the whole model by arithmetic."""
    report = Report("sealed_pull", "a sealed engine from a registry to its directory")
    columns = ("", "MB sent", "MB", "s here", "8B: MB", f"at {gbit:g} Gb/s s", "here s")
    grid = Grid(f"weights of {WEIGHTS * scale / 1e6:.0f} MB, {scale:g} of 8B's", columns)
    fixed = ways[2].seconds  # of what does not grow with the weights: seal, manifest, connections
    for way in ways:
        fetched = way.fetched + int(WEIGHTS * (1 - scale)) if way.grows else way.fetched
        network = fetched * 8 / gbit / 1e9
        part = min(fixed, way.seconds) if way is ways[0] else 0.0
        seconds = part + (way.seconds - part) / scale if way.grows else way.seconds
        grid.add(
            *(way.name, f"{way.sent / 1e6:.1f}", f"{way.fetched / 1e6:.1f}", f"{way.seconds:.2f}"),
            *(f"{fetched / 1e6:.0f}", f"{network:.2f}", f"{seconds:.1f}"),
        )
    report.grids.append(grid)
    whole, seal, *_ = ways
    report.figures.append(Figure("a new seal: sent / engine's", seal.sent / whole.sent))
    report.figures.append(Figure("a new seal: fetched / engine's", seal.fetched / whole.fetched))
    report.notes.append("the registry and the node are on this machine and its disk, not shaped")
    report.notes.append("8B: MB has the rest of the weights; at Gb/s are these bytes by the rate")
    report.notes.append(
        "the last column is s here, what the weights take by the scale: the longer of both counts"
    )
    return report


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--scale", type=float, default=0.125, help="of 16.4 GB of weights; 0.125")
    parser.add_argument("--gbit", type=float, default=10, help="Gb/s of the network; 10")
    parser.add_argument("--dir", type=Path, help="for registry and nodes: 4 times the weights")


if __name__ == "__main__":
    main("sealed_pull", __doc__, run, arguments)
