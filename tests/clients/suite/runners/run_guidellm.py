"""guidellm: benchmarks of chats, completions and responses with synthetic prompts."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

from checks import GIVEN, add, main, run, server

MOCK = server("mock")
STAND_INS = Path(__file__).parents[1] / "stand_ins"
REQUESTS = 6


def benchmark(path: str, profile: str = "kind=synchronous") -> None:
    """All requests of the benchmark succeed, as its JSON report says."""
    output = Path(GIVEN["work"]) / "output"
    shutil.rmtree(output, ignore_errors=True)
    target = {"kind": "openai_http", "target": MOCK.origin, "model": MOCK.model}
    load = {"kind": "hf_auto", "load_kwargs": {}, "model": MOCK.tokenizer}
    run(
        *("guidellm", "run", "--backend", json.dumps({**target, "request_format": path})),
        *("--profile", profile, "--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--data", "kind=synthetic_text,prompt_tokens=50,output_tokens=10"),
        *("--tokenizer", json.dumps(load), "--disable-console"),
        *("--output", f"kind=json,path={output / 'report.json'}"),
        PYTHONPATH=str(STAND_INS),
        USE_TORCH="0",
    )
    (found,) = json.loads((output / "report.json").read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0), totals
    if "completions" in path:
        assert found["metrics"]["time_to_first_token_ms"]["successful"]["mean"] > 0


for api in ("chat/completions", "completions", "responses"):
    add(api, partial(benchmark, f"/v1/{api}"))
add("chats at once", partial(benchmark, "/v1/chat/completions", "kind=concurrent,streams=3"))

if __name__ == "__main__":
    main()
