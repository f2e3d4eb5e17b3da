"""The original cog-triton's scripts: what test_perf.py and benchmark.py ask of Triton, and read.

Written from reading replicate/cog-triton, scripts/.
"""

from __future__ import annotations

import json
from typing import Any

import httpx

_S = 60


def perf_request(url: str, prompt: str, size: int) -> Any:
    """A request of ``test_perf.py --target triton``; the output_ids that it counts as success."""
    body = {
        "text_input": prompt,
        "max_tokens": size,
        "min_length": size,
        "bad_words": [],
        "stop_words": [],
    }
    answer = httpx.post(f"{url}/v2/models/ensemble/generate_stream", json=body, timeout=_S)
    answer.raise_for_status()
    return json.loads(answer.text[len("data: ") :])["output_ids"]


def benchmark_request(url: str, prompt: str, size: int) -> str:
    """A request of ``benchmark.py``: the text that it measures, which the prompt precedes."""
    parameters = {
        "max_tokens": size,
        "min_length": size,
        "bad_words": [""],
        "stop_words": [""],
        "temperature": 1.0,
    }
    body = {"text_input": prompt, "parameters": parameters}
    answer = httpx.post(f"{url}/v2/models/ensemble/generate", json=body, timeout=_S)
    return str(answer.json()["text_output"])
