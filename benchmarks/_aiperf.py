"""aiperf, the field's own load generator: its command line, and what it writes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cog_triton.errors import InvalidArgument, MissingExtra, NothingSucceeded
from cog_triton.system import reaper

INSTALL = (
    "install it into an environment of its own (python -m venv aiperf-env;"
    " aiperf-env/bin/pip install aiperf) and name it: --aiperf aiperf-env/bin/aiperf"
)
_REPORT = "profile_export_aiperf.json"
_TIMEOUT_S = 600
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent: `requests` in all, `concurrency` at once, lengths in tokens."""

    concurrency: int
    requests: int
    warmup: int
    input_tokens: int
    output_tokens: int
    seed: int


def require(path: Path) -> None:
    """Raise E1401, which says how to install it, unless `path` is a program."""
    if not path.is_file() or not os.access(path, os.X_OK):
        raise MissingExtra(f"--aiperf={str(path)!r}: there is no such program; {INSTALL}")


def command(path: Path, url: str, tokenizer: Path, load: Load, artifacts: Path) -> list[str]:
    """``aiperf profile`` against the chats of `url`, with a tokenizer from a directory."""
    options: dict[str, object] = {
        "model": "mock",
        "url": url,
        "endpoint-type": "chat",
        "tokenizer": tokenizer.absolute(),
        "concurrency": load.concurrency,
        "request-count": load.requests,
        "warmup-request-count": load.warmup,
        "synthetic-input-tokens-mean": load.input_tokens,
        "synthetic-input-tokens-stddev": 0,
        "output-tokens-mean": load.output_tokens,
        "output-tokens-stddev": 0,
        "extra-inputs": "ignore_eos:true",
        "random-seed": load.seed,
        "ui": "none",
        "artifact-dir": artifacts,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    flags = ("--streaming", "--use-server-token-count", "--no-gpu-telemetry")
    return [str(path), "profile", *words, *flags]


def run(words: list[str], artifacts: Path) -> dict[str, Any]:
    """Run `command` to its end, and all that it started; raises E2400 with its last lines."""
    # Either of these makes it look for a directory's name in the hub's cache, and fail.
    environment = {name: value for name, value in os.environ.items() if name not in _OFFLINE}
    artifacts.mkdir(parents=True, exist_ok=True)
    said, report = artifacts / "said.txt", artifacts / _REPORT
    with said.open("wb") as out:
        process = reaper.spawn(words, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        code = process.wait(_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise NothingSucceeded(f"aiperf ran for more than {_TIMEOUT_S} s") from None
    finally:
        process.kill()
    if code or not report.is_file():
        how = f"aiperf ended with {code}{'' if report.is_file() else ', without a report'}"
        raise NothingSucceeded(f"{how}:\n{said.read_text(errors='replace')[-3000:]}")
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def version(report: Mapping[str, Any]) -> str:
    """Which aiperf wrote `report`."""
    return str(report["aiperf_version"])


def value(report: Mapping[str, Any], metric: str, point: str) -> float:
    """A number of its report, in its own unit; raises E1005 naming one that is not there."""
    try:
        return float(report[metric][point])
    except KeyError:
        raise InvalidArgument(
            f"{_REPORT}: has no {metric}.{point} (aiperf {report.get('aiperf_version')})"
        ) from None


def failures(report: Mapping[str, Any]) -> list[str]:
    """What went wrong with requests, a line for each kind."""
    return [str(item) for item in report.get("error_summary", [])]
