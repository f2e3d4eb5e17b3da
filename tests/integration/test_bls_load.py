"""tensorrt_llm_bls under load, on the mock engine: no request is left without its answer."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from stack import Stack

pytestmark = [pytest.mark.integration, pytest.mark.full]

CLIENTS = 32
SECONDS = 8
TOKENS = (100, 1)
PATIENCE_S = 60


def test_every_request_is_answered_while_others_run(tmp_path: Path) -> None:
    """Half of them are short. As BLS calls, they lock up the stub of Triton 24.10 in seconds."""
    stack = Stack(tmp_path / "work", None, COG_TRITON_ENGINE="mock", MOCK_TPS="0")
    stack.work_dir.mkdir()
    until = 0.0

    def load(number: int) -> set[str]:
        url = f"{stack.triton}/v2/models/tensorrt_llm_bls/generate"
        body = {
            "text_input": f"I am {number}.",
            "max_tokens": TOKENS[number % 2],
            "exclude_input_in_output": True,
        }
        said = set()
        with httpx.Client(timeout=PATIENCE_S) as client:
            while time.monotonic() < until:
                answer = client.post(url, json=body)
                assert answer.status_code == 200, answer.text
                said.add(answer.json()["text_output"])
        return said

    with stack.served(), ThreadPoolExecutor(CLIENTS) as pool:
        until = time.monotonic() + SECONDS
        everything = list(pool.map(load, range(CLIENTS)))
        assert stack.predict("Hi", max_tokens=5)["status"] == "succeeded"
    assert [len(said) for said in everything] == [1] * CLIENTS
    assert len(set.union(*everything)) == len(TOKENS)
