"""Command line of scripts/verify-gpu; imports only the standard library, to run before set-up.

Run as a program, says "rehearse" or "run", and the directory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
PHASES = ("machine", "checks", "bench", "bench-python", "1b", "small", "prune")
ONLY_BY_NAME = (
    *("many", "kill", "pair", "replicas", "abilities", "peer"),
    *("park", "start"),
    *("resume", "resume-adapters", "resume-images"),
)
PARTS = (
    *("ours", "peer", "ours-small", "peer-small", "sealed-small", "predicted-small", "sealed"),
    "deterministic-small",
)
"""Parts of the phase start."""
MAX_AT_ONCE = 1024
"""As many requests as our server takes at once at default settings, in all."""
_ABOUT = """\
Check and measure the vLLM family on this machine's GPU, phase by phase.

machine  what all of it runs on
checks   two models served at once, each through all checks, under load together, and a crash
bench    vLLM's own server by its Rust front end, and ours at once, each with an engine, asked in
         turn, over a model of 8B
bench-python  /v1 beside vLLM's front end in Python
1b       ours beside both front ends, over a model so small that the servers are the limit
small    the same with SmolLM2-135M
prune    vLLM's own server over libraries pruned for this GPU: the same tokens, as fast

and only if they are named, of --gpus GPUs, best in this order:

many       a model of Llama 3.1 70B's shape on all of them, beside vLLM's own server
kill       kill -9 of one of its workers under 64 streams: lost, wrong, hung; the way back
pair       two engines on half of the GPUs each behind one front end: vLLM's data parallelism
replicas   two engines of ENGINE_REPLICAS there, by our choice; kill -9 of one under 64 streams
abilities  tools, n, log probabilities, logit_bias, LoRA, images, embeddings; within pair's start
peer       many beside vLLM's own server with its other front end

park       on one GPU: kill -9 of a server's engine under 64 streams, with a spare that sleeps and
           with none
resume     on one GPU: kill -9 of EngineCore under 64 streams of each of eight classes, at times
           spread over their length: whole, the same, and where they part, a near tie
resume-adapters, resume-images  the same by two LoRA adapters, and with an image in each prompt
start      on one GPU: where each second of a start goes, ours and vLLM's own server, with empty
           caches and with full ones, over a model of 8B and over SmolLM2

DIRECTORY (.work/gpu) is what scripts/setup-gpu set up, now if it was not. Checks and medians are in
DIRECTORY/results.json after each step, single measurements in samples.json, and tables in
results.md after each phase; a phase that is run again replaces its earlier results. Logs of the
servers are in DIRECTORY/logs, stacks of --profile in DIRECTORY/profiles. Exit code 0 only if every
check held in the phases that ran."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse `arguments`, else sys.argv; exits with 2 and the reason where one is wrong."""
    parser = argparse.ArgumentParser(
        prog="scripts/verify-gpu",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_measures(parser, PHASES, ONLY_BY_NAME)
    parser.add_argument("--root", type=_directory, metavar="DIRECTORY",
                        default=REPOSITORY / ".work" / "gpu")  # fmt: skip
    parser.add_argument(
        "--engine-python", type=_program, help="a Python with vLLM; else ROOT/env's"
    )
    return parser.parse_args(arguments)


def add_measures(
    parser: argparse.ArgumentParser, usual: Sequence[str], others: Sequence[str]
) -> None:
    """Options for what is run and how much of it; phases are of `usual` and `others`."""
    phases = partial(_names, (*usual, *others))
    parser.add_argument("--phase", type=phases, default=list(usual), metavar="PHASE,PHASE,...")
    parser.add_argument("--parts", type=partial(_names, PARTS), default=[], metavar="PART,...",
                        help="of start, else all")  # fmt: skip
    parser.add_argument("--budget", type=_seconds, metavar="SECONDS",
                        help="of a phase, then no more measurements begin (540; its own with"
                        " several GPUs)")  # fmt: skip
    parser.add_argument("--deadline", type=_seconds, default=86400, metavar="SECONDS",
                        help="of all phases; one that cannot end by then is not begun")  # fmt: skip
    parser.add_argument("--gpus", type=_gpus, default=8, help="2, 4 or 8 (8)")
    parser.add_argument("--layers", type=_whole,
                        help="of the 70B shape; else 80 on 8 GPUs, 40 on 4, 20 on 2;"
                        " of the 8B shape in park and start, else 32")  # fmt: skip
    parser.add_argument("--front-end", choices=("rust", "python"), default="rust",
                        help="of vLLM's server in many; peer has the other one (rust)")  # fmt: skip
    parser.add_argument("--rounds", type=_whole, default=3, help="of the benchmarks, at most (3)")
    parser.add_argument("--concurrency", type=_concurrencies, default=[1, 64, 256, 512],
                        metavar="N,...", help=f"up to {MAX_AT_ONCE} (1,64,256,512)")  # fmt: skip
    parser.add_argument("--profile", action="store_true", help="record where time goes (py-spy)")
    parser.add_argument("--argument", type=_argument, action="append", default=[],
                        metavar="NAME=VALUE",
                        help="one more engine argument for every server; JSON or text")  # fmt: skip
    parser.add_argument("--rehearse", action="store_true",
                        help="no GPU: over the double of vLLM, without vllm serve")  # fmt: skip


def _names(known: Sequence[str], text: str) -> list[str]:
    for name in text.split(","):
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r}: must be of {', '.join(known)}")
    return text.split(",")


def _directory(text: str) -> Path:
    path = Path(text).resolve()
    there = next(each for each in (path, *path.parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path}: cannot be written to")
    return path


def _program(text: str) -> Path:
    if not os.access(text, os.X_OK) or Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: no such program")
    return Path(text).absolute()  # a virtual environment is known by its link


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text) or not float(text):
        raise argparse.ArgumentTypeError(f"{text!r}: must be seconds, more than 0")
    return float(text)


def _whole(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, at least 1")
    return int(text)


def _gpus(text: str) -> int:
    if text not in ("2", "4", "8"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be 2, 4 or 8")
    return int(text)


def _concurrencies(text: str) -> list[int]:
    found = [_whole(number) for number in text.split(",")]
    if max(found) > MAX_AT_ONCE:
        raise argparse.ArgumentTypeError(f"{max(found)}: must be at most {MAX_AT_ONCE}")
    return found


def _argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise argparse.ArgumentTypeError(f"{text!r}: must be NAME=VALUE, as max_num_seqs=128")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


if __name__ == "__main__":
    options = parse()
    print("rehearse" if options.rehearse else "run", options.root)
