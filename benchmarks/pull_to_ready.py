"""From a registry to the first token: an image pulled, unpacked, started and asked, by compression.

The image is pushed to registries of this machine with gzip, zstd and zstd:chunked. Rounds go
through them in turns; each downloads the image, unpacks it, starts it with an engine, waits until
Cog is ready, asks for one token, and removes all of it. `docker pull`, which downloads and unpacks
at once, is timed beside that. IMAGE is what `nix build` leaves (./result) of an image that needs no
GPU. Needs docker, containerd's ctr and docker-registry (Debian: docker.io, docker-registry), root.

    .venv/bin/python benchmarks/pull_to_ready.py ./result engine.tar
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from statistics import median

import _load
from _report import Figure, Grid, Report, main, say
from _servers import PORTS, status

from cog_triton.system.ports import free_ports

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from local_registry import Registry, running

CI_DOCKER = Path(__file__).parents[1] / "scripts" / "ci-docker.sh"
CONTAINER = "bench-pull"
COMPRESSIONS = ("gzip", "zstd", "zstd:chunked")
INSIDE = "/src/engine.tar"
PROMPT = "What is the capital of France?"
_READY_S = 300


def run(*command: str | Path, environment: dict[str, str] | None = None) -> str:
    """Run a command; returns what it prints, and raises RuntimeError with its complaint."""
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **(environment or {})}
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}:\n{done.stdout}{done.stderr}")
    return done.stdout


class Daemon:
    """The docker daemon that scripts/ci-docker.sh starts, and its containerd.

    `docker pull` unpacks a layer while it downloads the next ones, so neither has a
    time of its own; containerd does one after the other when asked to.
    """

    def __init__(self, directory: Path) -> None:
        self._host = {"DOCKER_HOST": run(CI_DOCKER, "start", directory).strip()}
        self._socket = directory / "exec" / "containerd" / "containerd.sock"

    def docker(self, *arguments: str) -> str:
        """Run docker against this daemon."""
        return run("docker", *arguments, environment=self._host)

    def ctr(self, *arguments: str) -> str:
        """Run containerd's own client."""
        return run("ctr", "--address", self._socket, "--namespace", "bench", *arguments)

    @contextmanager
    def running(self, reference: str, *options: str) -> Iterator[None]:
        """Run an unpacked image on the host's network; returns at once."""
        # ctr copies the image's labels, and refuses those above 4 KB, as Cog's schema is.
        label = "--label=run.cog.openapi_schema=-"
        own = ("--detach", "--net-host", "--null-io", label)
        self.ctr("run", *own, *options, reference, CONTAINER)
        try:
            yield
        finally:
            self.ctr("tasks", "rm", "--force", CONTAINER)
            self.ctr("containers", "rm", CONTAINER)


@contextmanager
def daemon(directory: Path) -> Iterator[Daemon]:
    """A daemon of our own, stopped at the end."""
    try:
        yield Daemon(directory)
    finally:
        run(CI_DOCKER, "stop", directory)


def wait_until_ready(url: str) -> None:
    """Return when Cog is ready; raises RuntimeError when it cannot be any more."""
    deadline = time.monotonic() + _READY_S
    while (said := status(url)) != "READY":
        if said == "SETUP_FAILED" or time.monotonic() > deadline:
            raise RuntimeError(f"not ready: {said}")
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Way:
    """Seconds of one way from the registry to the first token."""

    pull: float
    unpack: float
    ready: float
    first_token: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(astuple(self))


@dataclass(frozen=True, slots=True)
class Pushed:
    """The image in the registry under one compression; `size` is that of its layers in bytes."""

    reference: str
    digest: str
    size: int


def push(image: Path, registry: Registry, compression: str) -> Pushed:
    """Push the image to a registry of its own: another would keep the layers that it has."""
    reference = f"{registry.address}/cog-triton:bench"
    options = ["--compression", compression, "--image-only", "--dest-tls-verify=false"]
    run(image, "push", reference, *options)
    manifest = registry.manifest("cog-triton", "bench")
    layers = manifest.json()["layers"]
    if any(compression.split(":")[0] not in layer["mediaType"] for layer in layers):
        raise RuntimeError(f"not all layers are {compression}: {layers}")
    size = sum(layer["size"] for layer in layers)
    return Pushed(reference, manifest.headers["Docker-Content-Digest"], size)


def seconds(action: Callable[[], object]) -> float:
    """Time an action; what others have written is on the disk before, and its own after it."""
    os.sync()
    began = time.perf_counter()
    action()
    os.sync()
    return time.perf_counter() - began


def measure(host: Daemon, image: Pushed, engine: Path) -> Way:
    """Go the way once, and remove the image."""
    try:
        pull = seconds(lambda: host.ctr("content", "fetch", "--plain-http", image.reference))
        unpack = seconds(lambda: host.ctr("snapshots", "unpack", image.digest))
        ports = free_ports(len(PORTS))
        settings = [f"--env={name}={port}" for name, port in zip(PORTS, ports, strict=True)]
        mount = f"--mount=type=bind,src={engine},dst={INSIDE},options=rbind:ro"
        options = (*settings, f"--env=COG_WEIGHTS={INSIDE}", mount)
        began = time.perf_counter()
        url = f"http://127.0.0.1:{ports[0]}"
        with host.running(image.reference, *options):
            wait_until_ready(url)
            ready = time.perf_counter()
            wave = _load.wave(url, {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}, 1)
            return Way(pull, unpack, ready - began, wave.streams[0].ttft_sent or 0.0)
    finally:
        host.ctr("images", "rm", "--sync", image.reference)


def docker_pull(host: Daemon, image: Pushed) -> float | None:
    """Seconds of `docker pull`, None where this docker cannot; the image is removed."""
    try:
        took = seconds(lambda: host.docker("pull", "--quiet", image.reference))
    except RuntimeError as error:
        say(str(error))
        return None
    host.docker("image", "rm", image.reference)
    return took


@contextmanager
def registries(directory: Path) -> Iterator[dict[str, Registry]]:
    """A registry of this machine for each compression, stopped at the end."""
    with ExitStack() as stack:
        made = {}
        for name in COMPRESSIONS:
            place = directory / name.replace(":", "-")
            place.mkdir(parents=True)
            made[name] = stack.enter_context(running(place))
        yield made


def run_rounds(args: argparse.Namespace) -> Report:
    """Push, go through the rounds, and compare."""
    image, engine = args.image.resolve(), args.engine.resolve()
    # Everybody may read it in the container, where the server is user 1000.
    engine.chmod(engine.stat().st_mode | 0o444)
    ways: dict[str, list[Way]] = {name: [] for name in COMPRESSIONS}
    pulls: dict[str, list[float | None]] = {name: [] for name in COMPRESSIONS}
    scratch = Path(tempfile.mkdtemp(prefix="cog-triton-bench-", dir=args.dir)).resolve()
    try:
        with registries(scratch / "registry") as stored, daemon(scratch / "docker") as host:
            pushed = {name: push(image, stored[name], name) for name in COMPRESSIONS}
            for number in range(1 if args.quick else args.rounds):
                for name in COMPRESSIONS if number % 2 else reversed(COMPRESSIONS):
                    ways[name].append(measure(host, pushed[name], engine))
                    pulls[name].append(docker_pull(host, pushed[name]))
                    say(f"{name}: {ways[name][-1].total:.2f} s")
            version = host.docker("version", "--format", "{{.Server.Version}}").strip()
    finally:
        shutil.rmtree(scratch)
    return compared({name: image.size for name, image in pushed.items()}, ways, pulls, version)


def compared(
    sizes: dict[str, int],
    ways: dict[str, list[Way]],
    pulls: dict[str, list[float | None]],
    docker: str,
) -> Report:
    """Table of medians, and ratios to gzip."""
    report = Report("pull_to_ready", "from a registry to the first token")
    names = [field.name.replace("_", " ") for field in fields(Way)]
    columns = ("", "MB", *names, "total", "slowest", "docker pull")
    grid = Grid(f"medians of {len(ways['gzip'])} rounds, in seconds", columns)
    totals = {name: median([way.total for way in found]) for name, found in ways.items()}
    for name, found in ways.items():
        parts = [median(part) for part in zip(*map(astuple, found), strict=True)]
        slowest = max(way.total for way in found)
        times = (f"{value:.2f}" for value in (*parts, totals[name], slowest))
        done = [took for took in pulls[name] if took is not None]
        whole = f"{median(done):.2f}" if done else "refused"
        grid.add(name, f"{sizes[name] / 1e6:.1f}", *times, whole)
    for name in COMPRESSIONS[1:]:
        ours, gzip = (
            median([way.pull + way.unpack for way in ways[key]]) for key in (name, "gzip")
        )
        report.figures.append(Figure(f"{name}: bytes / gzip", sizes[name] / sizes["gzip"]))
        report.figures.append(Figure(f"{name}: pull and unpack / gzip", ours / gzip))
        report.figures.append(Figure(f"{name}: total / gzip", totals[name] / totals["gzip"]))
    report.grids.append(grid)
    report.notes.append("the registry is on this machine, so `pull` has no network in it")
    report.notes.append("pull and unpack end when the disk has what they wrote")
    report.notes.append(f"docker pull: download and unpacking together, by docker {docker}")
    return report


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("image", type=Path, metavar="IMAGE", help="./result of an image")
    parser.add_argument("engine", type=Path, metavar="ENGINE", help="engine.tar")
    parser.add_argument("--rounds", type=int, default=5, help="of each compression")
    parser.add_argument("--dir", type=Path, help="for registry and images: 4 times the image")


if __name__ == "__main__":
    main("pull_to_ready", __doc__, run_rounds, arguments)
