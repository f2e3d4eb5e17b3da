"""Memory limit of Triton on the real Triton: a stub that long prompts made grow is replaced."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from stack import Stack, pid_of, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.full]

LIMIT_MIB = 30
"""More than a stub holds when it starts, less than one with such prompts."""
LONG = " the" * 100_000


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Stack]:
    variables = {"COG_TRITON_ENGINE": "mock", "TRITON_MEMORY_LIMIT": str(LIMIT_MIB)}
    with Stack(tmp_path / "work", None, **variables).served() as stack:
        yield stack


def metrics(stack: Stack) -> str:
    return httpx.get(f"{stack.own}/metrics", timeout=30).text


def test_planned_restart_fails_no_prediction_and_keeps_the_engine(limited: Stack) -> None:
    triton, engine = (pid_of(limited, word) for word in ("bin/tritonserver", "engine_process"))
    tuned = [
        b"MALLOC_ARENA_MAX=" in Path(f"/proc/{pid}/environ").read_bytes()
        for pid in (triton, engine)
    ]
    assert tuned == [True, False], "what computes has other needs of malloc"
    url = f"{limited.triton}/v2/models/ensemble/generate"
    long = {"text_input": LONG, "max_tokens": 2}
    with ThreadPoolExecutor(8) as pool:  # they may end with Triton, which gives them seconds
        list(pool.map(lambda _: httpx.post(url, json=long, timeout=60), range(16)))
    counted = 'cog_triton_planned_restarts_total{reason="memory"} 1.0'

    def restarted() -> bool:
        assert limited.predict(max_tokens=3)["status"] == "succeeded"
        assert limited.health() == "READY"
        return counted in metrics(limited)

    wait_until(restarted)
    assert pid_of(limited, "bin/tritonserver") != triton
    assert pid_of(limited, "engine_process") == engine
    assert "cog_triton_engine_restarts_total 0.0" in metrics(limited)
    assert f"more than {LIMIT_MIB} (TRITON_MEMORY_LIMIT)" in limited.output
