"""Overhead of `cog-triton build` over the same scripts run by hand.

By hand is what `--plan` prints, run by a shell, and then `tar cf`. Both sides take turns within one
run. Prints the time of each, what the builder adds and where, a run that finds everything done,
and the builder's own peak memory without its steps'.

    .venv/bin/python benchmarks/build_overhead.py [CONFIG ...]

Without CONFIG the demo is built, and an engine of the look-alike of TensorRT-LLM whose build step
takes --step-seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).parents[1]
DEMO = REPOSITORY / "configs" / "build" / "smollm2-135m-cpu.yaml"
LONG_S = 600.0
BUILDER = [sys.executable, "-m", "cog_triton", "build"]
LOOK_ALIKE = """
model_id: {model}
example_name: llama
convert_to_ft:
  script: convert_checkpoint.py
  output_dir: checkpoint
  args: {{model_dir: model, output_dir: checkpoint, dtype: float16}}
build:
  executable: trtllm-build
  output_dir: engine
  args: {{checkpoint_dir: checkpoint, output_dir: engine, max_batch_size: 8}}
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A build config, and what else building it needs."""

    name: str
    config: Path
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class Built:
    """Seconds of one `cog-triton build`, its peak memory and the size of engine.tar in MB."""

    checks: float
    steps: float
    package: float
    exit: float
    memory: float
    size: float

    @property
    def total(self) -> float:
        return self.checks + self.steps + self.package + self.exit


@dataclass(frozen=True, slots=True)
class ByHand:
    """Seconds of the scripts, and of `tar cf` after them."""

    steps: float
    tar: float


def lines_of(process: subprocess.Popen[str]) -> Iterator[tuple[float, float, str]]:
    """Lines of a process, each with its time in seconds and the peak memory until then in MB."""
    assert process.stdout is not None
    for line in process.stdout:
        status = Path(f"/proc/{process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        yield time.perf_counter(), int(found[1]) / 1024 if found else 0.0, line


def build(case: Case, scratch: Path, *words: str) -> Built:
    """Run one build; its progress lines tell the steps apart."""
    command = [*BUILDER, str(case.config), f"--work-dir={scratch}/work", "-o", f"{scratch}/e.tar"]
    began = first = packing = time.perf_counter()
    memory = 0.0
    with subprocess.Popen(
        [*command, *words], stdout=subprocess.PIPE, text=True, env=case.environment
    ) as process:
        last = began
        for last, held, line in lines_of(process):
            memory = max(memory, held)
            if line.startswith("[model]"):
                first = last
            elif line.startswith("[package]"):
                packing = last
    if process.returncode != 0:
        raise SystemExit(f"{case.name}: cog-triton build ended with {process.returncode}")
    ended = time.perf_counter()
    size = (scratch / "e.tar").stat().st_size / 1e6
    return Built(first - began, packing - first, last - packing, ended - last, memory, size)


def by_hand(case: Case, scratch: Path) -> ByHand:
    """Run the commands of the plan by a shell, in a directory of their own."""
    place = scratch / "hand"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    commands, model, engine = planned(case, scratch)
    (place / "model").symlink_to(model)
    script = f"set -e\n{commands}"
    began = time.perf_counter()
    subprocess.run(
        ["sh", "-c", script], cwd=place, env=case.environment, check=True, capture_output=True
    )
    done = time.perf_counter()
    subprocess.run(["tar", "cf", "engine.tar", "-C", engine, "."], cwd=place, check=True)
    return ByHand(done - began, time.perf_counter() - done)


def planned(case: Case, scratch: Path) -> tuple[str, str, str]:
    """Commands that `--plan` prints, the model's path, and the engine directory's."""
    command = [*BUILDER, str(case.config), f"--work-dir={scratch}/work", "--plan"]
    text = subprocess.check_output(command, text=True, env=case.environment)
    head, *steps = text.split("\n\n")
    commands = [step.partition("  $ ")[2] for step in steps]
    (*_, engine) = re.findall(r"^  writes  (.+)$", text, re.MULTILINE)
    return "\n".join(commands), head.splitlines()[1].strip(), engine


def cases(given: list[Path], scratch: Path, seconds: float) -> Iterator[Case]:
    """Cases of the command line's configs, else of the demo and the look-alike."""
    inherited = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    for config in given or [DEMO]:
        yield Case(config.stem, config, inherited)
    if not given:
        sys.path.insert(0, str(REPOSITORY / "tests"))
        from tensorrt_llm_tree import install, models

        model = models.llama(scratch / "model")
        config = scratch / "look-alike.yaml"
        config.write_text(LOOK_ALIKE.format(model=model))
        sleep = {"TENSORRT_LLM_TREE": f"trtllm-build sleep {seconds:g}"}
        environment = {**inherited, **install(scratch / "tree").environment, **sleep}
        yield Case(f"a step of {seconds:g} s", config, environment)


def main() -> None:
    """Run the rounds and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configs", type=Path, nargs="*", metavar="CONFIG", help="build configs")
    parser.add_argument("--rounds", type=int, default=6, help="builds of each side")
    parser.add_argument("--step-seconds", type=float, default=10, help="of the look-alike's build")
    parser.add_argument("--json", type=Path, help="also write every round to this file")
    args = parser.parse_args()
    results: dict[str, list[tuple[ByHand, Built]]] = {}
    cached: dict[str, list[Built]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, case in enumerate(cases(args.configs, Path(scratch), args.step_seconds)):
            place = Path(scratch, str(number))
            place.mkdir()
            build(case, place)  # warms the page cache
            for round_ in range(args.rounds):
                # Each side goes first as often: one's files are still being written to disk.
                if round_ % 2:
                    ours = build(case, place, "--no-cache")
                hand = by_hand(case, place)
                if not round_ % 2:
                    ours = build(case, place, "--no-cache")
                results.setdefault(case.name, []).append((hand, ours))
                print(f"{case.name} {round_}: {hand} {ours}", file=sys.stderr)
            cached[case.name] = [build(case, place) for _ in range(2 * args.rounds)]
    report(results, cached)
    if args.json:
        rounds = {
            name: [{"by_hand": asdict(hand), "built": asdict(ours)} for hand, ours in pairs]
            for name, pairs in results.items()
        }
        again = {name: [asdict(run) for run in runs] for name, runs in cached.items()}
        args.json.write_text(json.dumps({"rounds": rounds, "cached": again}))


def report(results: dict[str, list[tuple[ByHand, Built]]], cached: dict[str, list[Built]]) -> None:
    """Print medians over the rounds; a ratio or difference is the median of the rounds' own."""
    median = statistics.median
    times = Table(title="the scripts by hand, and cog-triton build --no-cache: seconds")
    for name in ("build", "scripts", "tar cf", "cog-triton", "ratio to scripts", "to scripts+tar"):
        times.add_column(name, justify="right")
    added = Table(title="what cog-triton adds to the scripts: seconds")
    columns = ("build", "all", "checks", "steps", "package", "exit", "engine MB", "of 10 minutes")
    for name in columns:
        added.add_column(name, justify="right")
    again = Table(title="everything is done already")
    for name in ("build", "median s", "slowest s", "peak MB", "peak MB when all is built"):
        again.add_column(name, justify="right")
    for name, pairs in results.items():
        times.add_row(
            name,
            f"{median(hand.steps for hand, _ in pairs):.2f}",
            f"{median(hand.tar for hand, _ in pairs):.2f}",
            f"{median(ours.total for _, ours in pairs):.2f}",
            f"{median(ours.total / hand.steps for hand, ours in pairs):.4f}",
            f"{median(ours.total / (hand.steps + hand.tar) for hand, ours in pairs):.4f}",
        )
        extra = median(ours.total - hand.steps for hand, ours in pairs)
        added.add_row(
            name,
            f"{extra:.2f}",
            f"{median(ours.checks for _, ours in pairs):.2f}",
            f"{median(ours.steps - hand.steps for hand, ours in pairs):.2f}",
            f"{median(ours.package for _, ours in pairs):.2f}",
            f"{median(ours.exit for _, ours in pairs):.2f}",
            f"{pairs[0][1].size:.0f}",
            f"{extra / LONG_S:.2%}",
        )
        again.add_row(
            name,
            f"{median(run.total for run in cached[name]):.2f}",
            f"{max(run.total for run in cached[name]):.2f}",
            f"{max(run.memory for run in cached[name]):.0f}",
            f"{max(ours.memory for _, ours in pairs):.0f}",
        )
    console = Console()
    console.print(times, added)
    console.print(
        "'of 10 minutes' is 'all' against scripts that take so long and write an engine of the"
        " same size. Of a larger one 'package' is larger in proportion, as `tar cf` is by hand."
    )
    console.print(again)


if __name__ == "__main__":
    main()
