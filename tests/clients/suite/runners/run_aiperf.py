"""aiperf: profiles of chats and completions, streamed and whole."""

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
REQUESTS = 6


def profile(*flags: str, kind: str = "chat") -> dict[str, Any]:
    """Its JSON export, of a run without errors."""
    output = WORK / "artifacts"
    shutil.rmtree(output, ignore_errors=True)
    url = MOCK.openai.removesuffix("/v1")
    command = ["aiperf", "profile", "--model", MOCK.model, "--url", url, "--endpoint-type", kind]
    command += ["--tokenizer", MOCK.tokenizer, "--request-count", str(REQUESTS), "--ui", "none"]
    command += ["--synthetic-input-tokens-mean", "50", "--synthetic-input-tokens-stddev", "0"]
    command += ["--output-tokens-mean", "20", "--output-tokens-stddev", "0", "--concurrency", "2"]
    command += ["--no-gpu-telemetry", "--artifact-dir", str(output)]
    # With it, aiperf takes a tokenizer's path for a name in the hub's cache.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [*command, *flags], env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-1500:]
    (found,) = output.rglob("profile_export_aiperf.json")
    result = json.loads(found.read_text())
    assert result["request_count"]["avg"] == REQUESTS, result["request_count"]
    assert not result.get("error_request_count", {"avg": 0})["avg"]
    return result


@check
def chats_streamed() -> None:
    found = profile("--streaming", "--extra-inputs", "ignore_eos:true")
    assert found["time_to_first_token"]["avg"] > 0
    assert found["inter_token_latency"]["avg"] > 0


@check
def chats_with_the_servers_token_counts() -> None:
    flags = ("--streaming", "--use-server-token-count", "--extra-inputs", "ignore_eos:true")
    assert profile(*flags)["output_sequence_length"]["avg"] == 20


@check
def chats_whole() -> None:
    assert profile()["request_latency"]["avg"] > 0


@check
def completions_streamed() -> None:
    assert profile("--streaming", kind="completions")["time_to_first_token"]["avg"] > 0


@check
def responses_streamed() -> None:
    assert profile("--streaming", kind="responses")["time_to_first_token"]["avg"] > 0


if __name__ == "__main__":
    main()
