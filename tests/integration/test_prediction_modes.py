"""Predictions: real Cog and real Triton, and the mock for a model."""

from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import httpx
import pytest
from engine_fixtures import ENDLESS, FRANCE, PARIS, MockText
from stack import Stack, text_of, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("mock")]

USER = {"role": "user", "content": "Hi."}
SYSTEM = {"role": "system", "content": "a"}


def wait_until_idle(mock: Stack) -> None:
    """Wait until the engine has no request: an endless one has been cancelled by then."""
    wait_until(lambda: mock.engine_requests() == 0)


def test_chat_template_gives_the_right_answer(mock: Stack, mock_text: MockText) -> None:
    prediction = mock.predict(FRANCE, temperature=0, max_tokens=32)
    assert text_of(prediction) == PARIS
    metrics = prediction["metrics"]
    assert metrics["input_token_count"] == mock_text.count_chat(("user", FRANCE))
    assert metrics["output_token_count"] == mock_text.count(PARIS)
    assert metrics["finish_reason"] == "stop"
    assert 0 < metrics["time_to_first_token"] < metrics["predict_time"]
    assert metrics["tokens_per_second"] > 0


def test_output_streams_during_generation(mock: Stack, mock_text: MockText) -> None:
    with mock.stream("Count.", max_tokens=ENDLESS) as events:
        assert len(list(islice((kind for kind, _ in events if kind == "output"), 3))) == 3
        wait_until(lambda: mock.engine_requests() == 1)
    wait_until_idle(mock)
    with mock.stream("Count.", max_tokens=60, min_tokens=60) as events:
        found = list(events)
    assert "".join(data["chunk"] for kind, data in found if kind == "output") == mock_text(60)
    assert found[-1][0] == "completed"


def test_sixteen_concurrent_streams_complete_beside_one_that_continues(
    mock: Stack, mock_text: MockText
) -> None:
    def one(number: int) -> str:
        text = ""
        with mock.stream(f"Say {number}.", max_tokens=40, seed=1) as events:
            for kind, data in events:
                if kind == "output":
                    text += data["chunk"]
                assert kind != "completed" or data["status"] == "succeeded"
        return text

    with mock.stream("Count.", max_tokens=ENDLESS) as events:
        outputs = (data for kind, data in events if kind == "output")
        next(outputs)
        with ThreadPoolExecutor(16) as pool:
            assert set(pool.map(one, range(16))) == {mock_text(40)}
        wait_until(lambda: mock.engine_requests() == 1)
        assert next(outputs)["chunk"]
    wait_until_idle(mock)


def test_no_request_is_rejected_while_slots_are_free(mock: Stack) -> None:
    """coglet with several runtime threads answers a few of these with 409."""

    def loop(_: int) -> set[int]:
        with httpx.Client(timeout=300) as http:
            body = {"input": {"prompt": ""}}
            url = f"{mock.url}/predictions"
            return {http.post(url, json=body).status_code for _ in range(40)}

    with ThreadPoolExecutor(48) as pool:
        assert set().union(*pool.map(loop, range(48))) == {200}


def test_disconnect_before_the_first_token_frees_the_slot(mock: Stack) -> None:
    prompt = "This is a long prompt. " * 1200
    with mock.stream(prompt, tps=0.003, max_tokens=1):
        wait_until(lambda: mock.engine_requests() == 1)
    wait_until_idle(mock)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"messages": [USER], "prompt": "", "prompt_template": "{prompt}"}, ["E1006", "set one"]),
        ({"messages": [SYSTEM, USER], "prompt": "", "system_prompt": "b"}, ["E1006", "already"]),
        # The engine refuses this one, not the predictor.
        ({"inject": "error", "inject_after": 600}, ["E1005", "inject_after=600", "less than 512"]),
    ],
)
def test_bad_input_gets_its_code_and_leaves_others_running(
    mock: Stack, values: dict[str, Any], words: list[str]
) -> None:
    with mock.stream("Count.", max_tokens=ENDLESS) as events:
        outputs = (data for kind, data in events if kind == "output")
        next(outputs)
        prediction = mock.predict(**{"prompt": "Hi.", **values})
        assert prediction["status"] == "failed"
        for word in words:
            assert word in prediction["error"]
        wait_until(lambda: mock.engine_requests() == 1)
        assert next(outputs)["chunk"]
    wait_until_idle(mock)
