"""aiperf: profiles of chats, completions and responses, streamed and whole."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from checks import GIVEN, add, check, main, run, server

MOCK = server("mock")
REQUESTS = "6"
SETTINGS = {
    "--model": MOCK.model,
    "--url": MOCK.origin,
    "--tokenizer": MOCK.tokenizer,
    "--request-count": REQUESTS,
    "--ui": "none",
    "--synthetic-input-tokens-mean": "50",
    "--synthetic-input-tokens-stddev": "0",
    "--output-tokens-mean": "20",
    "--output-tokens-stddev": "0",
    "--concurrency": "2",
    "--extra-inputs": "ignore_eos:true",
    "--artifact-dir": str(Path(GIVEN["work"]) / "artifacts"),
}
del os.environ["HF_HUB_OFFLINE"]  # with it, aiperf takes a tokenizer's path for a name in the cache


def profile(kind: str, *flags: str) -> dict[str, Any]:
    """Its JSON export, of a run without errors."""
    output = Path(SETTINGS["--artifact-dir"])
    shutil.rmtree(output, ignore_errors=True)
    settings = [part for pair in SETTINGS.items() for part in pair]
    run("aiperf", "profile", *settings, "--no-gpu-telemetry", "--endpoint-type", kind, *flags)
    (found,) = output.rglob("profile_export_aiperf.json")
    result = json.loads(found.read_text())
    assert result["request_count"]["avg"] == int(REQUESTS), result["request_count"]
    assert not result.get("error_request_count", {"avg": 0})["avg"]
    return result


def streamed(kind: str) -> None:
    found = profile(kind, "--streaming")
    assert found["time_to_first_token"]["avg"] > 0
    assert found["inter_token_latency"]["avg"] > 0


for api in ("chat", "completions", "responses"):
    add(f"{api} streamed", partial(streamed, api))


@check
def chat_with_the_servers_token_counts() -> None:
    found = profile("chat", "--streaming", "--use-server-token-count")
    assert found["output_sequence_length"]["avg"] == 20


@check
def chat_whole() -> None:
    assert profile("chat")["request_latency"]["avg"] > 0


if __name__ == "__main__":
    main()
