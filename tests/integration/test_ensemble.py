"""The text models of the repository on the real Triton: the original's curl lines, and beyond."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from engine_fixtures import ENDLESS, FRANCE, LEARNING, PARIS, QUESTION, REPEATED
from stack import processes_of, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("mock")]

BOTH = pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])


@dataclass(frozen=True)
class Triton:
    """A running server, reached as curl would."""

    http: str

    def post(self, model: str, endpoint: str = "generate", **values: Any) -> httpx.Response:
        return httpx.post(f"{self.http}/v2/models/{model}/{endpoint}", json=values, timeout=60)

    def generate(self, model: str, **values: Any) -> dict[str, Any]:
        response = self.post(model, **values)
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    def stream(self, model: str, **values: Any) -> list[dict[str, Any]]:
        response = self.post(model, "generate_stream", stream=True, **values)
        return [json.loads(line[6:]) for line in response.text.splitlines() if line]

    def text(self, model: str, **values: Any) -> str:
        return "".join(event["text_output"] for event in self.stream(model, **values))

    def refusal(self, model: str, **values: Any) -> str:
        response = self.post(model, **{"text_input": "Hi", "max_tokens": 2, **values})
        assert response.status_code == 400, response.text
        return str(response.json()["error"])


@pytest.fixture(scope="module")
def triton(mock):
    return Triton(mock.triton)


@BOTH
def test_every_input_may_be_omitted_or_given(triton, mock_text, model):
    plain = triton.generate(model, text_input=QUESTION, max_tokens=8)
    assert not {"num_output_tokens", "output_log_probs", "cum_log_probs"} & plain.keys()
    full = triton.generate(
        model,
        text_input=QUESTION,
        max_tokens=8,
        end_id=-1,
        pad_id=2,
        min_tokens=1,
        stop_words=["qqqq", "zzzz"],
        bad_words=[""],
        temperature=0.8,
        top_k=50,
        top_p=0.9,
        length_penalty=1.0,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        seed=7,
        embedding_bias_words="",
        beam_width=1,
        num_return_sequences=1,
        stream=False,
        exclude_input_in_output=True,
        return_log_probs=True,
        return_context_logits=False,
        return_generation_logits=False,
        return_perf_metrics=False,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
    )
    assert not full["text_output"].startswith(QUESTION)
    assert full["num_input_tokens"] == mock_text.count(QUESTION)
    assert full["num_output_tokens"] == len(full["output_log_probs"]) == 8


@BOTH
def test_older_names_of_inputs_are_taken(triton, mock_text, model):
    values = {"text_input": FRANCE, "max_tokens": 30, "temperature": 1.0, "top_p": 0.9}
    named = triton.generate(model, **values, min_tokens=20, seed=9)
    assert triton.generate(model, **values, min_length=20, random_seed=9) == named
    assert named["text_output"].startswith(FRANCE + PARIS + "The capital")
    assert triton.generate(model, **values)["text_output"] == FRANCE + PARIS
    assert "two names of one input" in triton.refusal(model, seed=1, random_seed=2)
    assert "two names of one input" in triton.refusal(model, min_tokens=1, min_length=2)


@BOTH
def test_the_prompt_is_echoed_unless_excluded(triton, model):
    whole = triton.generate(model, text_input=QUESTION, max_tokens=200)["text_output"]
    answer = triton.generate(
        model, text_input=QUESTION, max_tokens=200, exclude_input_in_output=True
    )["text_output"]
    assert whole == QUESTION + answer
    assert answer == LEARNING
    assert triton.text(model, text_input=QUESTION, max_tokens=200) == answer


@BOTH
def test_end_id_defaults_to_the_engines_own_and_minus_one_disables_it(triton, mock_text, model):
    counts = [
        triton.generate(
            model, text_input=FRANCE, max_tokens=40, return_num_output_tokens=True, **end
        )["num_output_tokens"]
        for end in ({}, {"end_id": -1})
    ]
    assert counts == [mock_text.count(PARIS), 40]


@BOTH
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"bad_words": ["a"]}, "bad_words"),
        ({"beam_width": 2}, "beam_width=2"),
        ({"return_context_logits": True}, "return_context_logits"),
        ({"decoder_text_input": "x"}, "decoder_input"),
        ({"embedding_bias_words": ["x"], "embedding_bias_weights": [1.0]}, "embedding_bias_words"),
        ({"temprature": 0.5}, "temprature: unknown input; did you mean 'temperature'?"),
        ({"temperature": -1}, "temperature=-1"),
        ({"max_tokens": 200_000}, "E1002 PromptTooLong"),
        ({"text_input": ""}, "E1001 PromptRequired"),
    ],
)
def test_unsupported_inputs_are_refused_by_name(triton, model, values, said):
    assert said in triton.refusal(model, **values)


@BOTH
@pytest.mark.parametrize("stream", [True, False])
def test_stop_words_span_tokens_and_stop_the_engine(triton, mock, stream, model):
    values = {"text_input": QUESTION, "max_tokens": ENDLESS, "end_id": -1}
    stop = "ne learning is a sub"
    if stream:
        text = triton.text(model, **values, stop_words=["absent", stop])
    else:
        body = triton.generate(model, **values, stop_words=[stop], exclude_input_in_output=True)
        text = body["text_output"]
    assert text == LEARNING[: LEARNING.index(stop)]
    wait_until(lambda: mock.engine_requests() == 0)


@BOTH
def test_characters_that_span_tokens_stay_whole(triton, model):
    prompt = f"<|im_start|>user\nRepeat exactly: {REPEATED[1]}<|im_end|>\n<|im_start|>assistant\n"
    events = triton.stream(model, text_input=prompt, max_tokens=24)
    pieces = [event["text_output"] for event in events]
    whole = triton.generate(model, text_input=prompt, max_tokens=24, exclude_input_in_output=True)[
        "text_output"
    ]
    assert "".join(pieces) == whole == REPEATED[1]
    assert not any("\ufffd" in piece for piece in pieces)


def test_bls_requests_run_concurrently(triton, mock, mock_text):
    def count_from(number: int) -> str:
        values = {"text_input": f"Count from {number}:", "max_tokens": 24, "end_id": -1}
        return triton.text("tensorrt_llm_bls", **values)

    url = f"{triton.http}/v2/models/tensorrt_llm_bls/generate_stream"
    values = {"text_input": "Once", "max_tokens": ENDLESS, "end_id": -1, "stream": True}
    with httpx.stream("POST", url, json=values, timeout=60) as response:
        events = (line for line in response.iter_lines() if line)
        next(events)
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(count_from, range(8))) == {mock_text(24)}
        wait_until(lambda: mock.engine_requests() == 1)
        next(events)
    wait_until(lambda: mock.engine_requests() == 0)


@BOTH
def test_a_disconnected_client_stops_the_engine(triton, mock, model):
    url = f"{triton.http}/v2/models/{model}/generate_stream"
    values = {"text_input": "Once", "max_tokens": ENDLESS, "end_id": -1, "stream": True}
    with httpx.stream("POST", url, json=values, timeout=60) as response:
        events = (line for line in response.iter_lines() if line)
        for _ in range(5):
            next(events)
        wait_until(lambda: mock.engine_requests() == 1)
    wait_until(lambda: mock.engine_requests() == 0)


def test_bls_does_not_crash_its_stub(triton, mock):
    """Triton's stub frees ended responses without the GIL, which killed it on Python 3.12."""

    def stubs() -> set[int]:
        lines = processes_of(mock.work_dir).items()
        return {pid for pid, line in lines if "/model_repo/tensorrt_llm_bls/1/" in line}

    before = stubs()
    assert before
    for _ in range(20):
        triton.generate("tensorrt_llm_bls", text_input="Hi", max_tokens=2)
    assert before <= stubs()
