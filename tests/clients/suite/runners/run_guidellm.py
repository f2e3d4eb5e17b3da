"""guidellm: benchmarks of chats, completions and responses with synthetic prompts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from checks import GIVEN, check, main, server

MOCK = server("mock")
WORK = Path(GIVEN["work"])
STAND_INS = Path(__file__).parents[1] / "stand_ins"
REQUESTS = 6


def run(path: str, profile: str = "kind=synchronous", **backend: Any) -> dict[str, Any]:
    """The benchmark of its JSON report, all of whose requests succeeded."""
    output = WORK / "output"
    shutil.rmtree(output, ignore_errors=True)
    target = {"kind": "openai_http", "target": MOCK.openai.removesuffix("/v1")}
    target |= {"model": MOCK.model, "request_format": path, **backend}
    command = ["guidellm", "run", "--backend", json.dumps(target), "--profile", profile]
    command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=50,output_tokens=10"]
    load = {"kind": "hf_auto", "load_kwargs": {}, "model": MOCK.tokenizer}
    command += ["--tokenizer", json.dumps(load), "--disable-console"]
    command += ["--output", f"kind=json,path={output / 'report.json'}"]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(STAND_INS), "USE_TORCH": "0"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-1500:]
    (benchmark,) = json.loads((output / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0), totals
    return benchmark["metrics"]


@check
def chats() -> None:
    found = run("/v1/chat/completions")
    assert found["time_to_first_token_ms"]["successful"]["mean"] > 0


@check
def chats_concurrently() -> None:
    run("/v1/chat/completions", "kind=concurrent,streams=3")


@check
def completions() -> None:
    assert run("/v1/completions")["inter_token_latency_ms"]["successful"]["mean"] > 0


@check
def responses() -> None:
    run("/v1/responses")


if __name__ == "__main__":
    main()
