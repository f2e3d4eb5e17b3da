"""The text models of the repository on the real Triton: the original's curl lines, and beyond."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from stack import Stack, processes_of

pytestmark = pytest.mark.integration

QUESTION = "What is machine learning?"
BOTH = pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])


@dataclass(frozen=True)
class Triton:
    """A running server, reached as curl would."""

    http: str
    metrics: str

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

    def active(self) -> float:
        """Requests the engine holds, by its own count."""
        return sum(
            float(line.split()[-1])
            for line in httpx.get(self.metrics).text.splitlines()
            if line.startswith("nv_trt_llm_request_metrics{") and 'request_type="active"' in line
        )


@pytest.fixture(scope="module")
def triton(stack: Stack) -> Triton:
    return Triton(stack.triton, f"http://127.0.0.1:{stack.metrics}/metrics")


def test_the_curl_line_of_the_original_answers_text(triton):
    body = triton.generate(
        "ensemble", text_input=QUESTION, max_tokens=20, bad_words="", stop_words=""
    )
    assert body["text_output"].startswith(QUESTION)
    assert "learning" in body["text_output"][len(QUESTION) :]


@BOTH
def test_every_input_may_be_omitted_or_given(triton, model):
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
    assert full["num_input_tokens"] == 5
    assert full["num_output_tokens"] == len(full["output_log_probs"]) == 8


@BOTH
def test_older_names_of_inputs_are_taken(triton, model):
    values = {"text_input": QUESTION, "max_tokens": 12, "temperature": 1.0, "top_p": 0.9}
    named = triton.generate(model, **values, min_tokens=12, seed=9)
    assert triton.generate(model, **values, min_length=12, random_seed=9) == named
    assert "two names of one input" in triton.refusal(model, seed=1, random_seed=2)


@BOTH
def test_the_prompt_is_echoed_unless_excluded(triton, model):
    whole = triton.generate(model, text_input=QUESTION, max_tokens=8)["text_output"]
    answer = triton.generate(
        model, text_input=QUESTION, max_tokens=8, exclude_input_in_output=True
    )["text_output"]
    assert whole == QUESTION + answer
    assert triton.text(model, text_input=QUESTION, max_tokens=8) == answer


@BOTH
def test_end_id_defaults_to_the_engines_own_and_minus_one_disables_it(triton, model):
    prompt = "<|im_start|>user\nSay just the word yes.<|im_end|>\n<|im_start|>assistant\n"
    counts = [
        triton.generate(
            model, text_input=prompt, max_tokens=40, return_num_output_tokens=True, **end
        )["num_output_tokens"]
        for end in ({}, {"end_id": -1})
    ]
    assert counts[0] < counts[1] == 40


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
        ({"max_tokens": 100_000}, "E1002 PromptTooLong"),
        ({"text_input": ""}, "E1001 PromptRequired"),
    ],
)
def test_unsupported_inputs_are_refused_by_name(triton, model, values, said):
    assert said in triton.refusal(model, **values)


@BOTH
@pytest.mark.parametrize("stream", [True, False])
def test_stop_words_span_tokens_and_stop_the_engine(triton, stream, model):
    values = {"text_input": QUESTION, "max_tokens": 2000, "end_id": -1}
    reference = triton.text(model, **{**values, "max_tokens": 30})
    stop = "ne learning is a sub"
    wanted = reference[: reference.index(stop)]
    if stream:
        text = triton.text(model, **values, stop_words=["absent", stop])
    else:
        body = triton.generate(model, **values, stop_words=[stop], exclude_input_in_output=True)
        text = body["text_output"]
    assert text == wanted
    assert_idle(triton)


@BOTH
def test_characters_that_span_tokens_stay_whole(triton, model):
    prompt = "<|im_start|>user\nRepeat exactly: 🦜🌈 你好世界<|im_end|>\n<|im_start|>assistant\n"
    events = triton.stream(model, text_input=prompt, max_tokens=24)
    pieces = [event["text_output"] for event in events]
    whole = triton.generate(model, text_input=prompt, max_tokens=24, exclude_input_in_output=True)[
        "text_output"
    ]
    assert "".join(pieces) == whole
    assert len(pieces) > 1
    assert not any("\ufffd" in piece for piece in pieces[:-1])
    assert any(ord(char) > 0x1000 for char in whole)


def test_bls_requests_run_concurrently(triton):
    def count_from(number: int) -> str:
        values = {"text_input": f"Count from {number}:", "max_tokens": 24, "end_id": -1}
        return triton.text("tensorrt_llm_bls", **values)

    with ThreadPoolExecutor(8) as pool:
        together = [pool.submit(count_from, number) for number in range(8)]
        most = 0.0
        while not all(future.done() for future in together):
            most = max(most, triton.active())
            time.sleep(0.01)
    assert most > 1
    assert [future.result() for future in together] == [count_from(n) for n in range(8)]


@BOTH
def test_a_disconnected_client_stops_the_engine(triton, model):
    url = f"{triton.http}/v2/models/{model}/generate_stream"
    values = {"text_input": "Once", "max_tokens": 8000, "end_id": -1, "stream": True}
    with httpx.stream("POST", url, json=values, timeout=60) as response:
        events = (line for line in response.iter_lines() if line)
        for _ in range(5):
            next(events)
        assert triton.active() == 1
    assert_idle(triton)


def assert_idle(triton: Triton) -> None:
    """8000 tokens would take many times as long as is waited here."""
    deadline = time.monotonic() + 5
    while triton.active() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert triton.active() == 0


def test_bls_does_not_crash_its_stub(triton, stack):
    """Triton's stub frees ended responses without the GIL, which killed it on Python 3.12."""

    def stubs() -> set[int]:
        lines = processes_of(stack.work_dir).items()
        return {pid for pid, line in lines if "/model_repo/tensorrt_llm_bls/1/" in line}

    before = stubs()
    assert before
    for _ in range(20):
        triton.generate("tensorrt_llm_bls", text_input="Hi", max_tokens=2)
    assert before <= stubs()
