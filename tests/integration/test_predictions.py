"""Predictions of the runner: real Cog, real Triton, real model."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from stack import Stack, text_of, wait_until

pytestmark = pytest.mark.integration

FRANCE = "What is the capital of France?"
# A fraction of what the requests would take; a second is enough on a machine that is not busy.
FREED_S = 10


def test_chat_template_gives_the_right_answer(stack: Stack) -> None:
    prediction = stack.predict(FRANCE, temperature=0, max_tokens=32)
    assert text_of(prediction) == "The capital of France is Paris."
    metrics = prediction["metrics"]
    assert metrics["input_token_count"] == 37
    assert metrics["output_token_count"] == 7
    assert metrics["finish_reason"] == "stop"
    assert 0 < metrics["time_to_first_token"] < metrics["predict_time"]
    assert metrics["tokens_per_second"] > 0


def test_output_streams_during_generation(stack: Stack) -> None:
    with stack.stream("Count to fifty.", max_tokens=120, min_tokens=120) as events:
        kinds = []
        for kind, _ in events:
            kinds.append(kind)
            if kinds.count("output") == 3:
                assert stack.engine_requests() == 1  # the engine has yet to end
                break
        rest = [kind for kind, _ in events]
    assert "output" in rest
    assert rest[-1] == "completed"


def test_sixteen_concurrent_streams_complete_and_share_steps(stack: Stack) -> None:
    def one(number: int) -> str:
        text = ""
        with stack.stream(f"Tell me about the number {number}.", max_tokens=40, seed=1) as events:
            for kind, data in events:
                if kind == "output":
                    text += data["chunk"]
                assert kind != "completed" or data["status"] == "succeeded"
        return text

    most = 0
    with ThreadPoolExecutor(16) as pool:
        texts = [pool.submit(one, number) for number in range(16)]
        while not all(text.done() for text in texts):
            most = max(most, stack.engine_requests())
            time.sleep(0.01)
    assert all(text.result() for text in texts)
    assert most > 1
    wait_until(lambda: stack.engine_requests() == 0, FREED_S)


def test_no_request_is_rejected_while_slots_are_free(stack: Stack) -> None:
    """coglet with several runtime threads answers a few of these with 409."""

    def loop(_: int) -> set[int]:
        with httpx.Client() as http:
            body = {"input": {"prompt": ""}}
            url = f"{stack.url}/predictions"
            return {http.post(url, json=body, timeout=60).status_code for _ in range(40)}

    with ThreadPoolExecutor(48) as pool:
        assert set().union(*pool.map(loop, range(48))) == {200}


def test_disconnect_after_five_tokens_frees_the_slot(stack: Stack) -> None:
    with stack.stream("Tell me a very long story.", max_tokens=4000) as events:
        outputs = (kind for kind, _ in events if kind == "output")
        for _ in range(5):
            next(outputs)
        assert stack.engine_requests() == 1
    wait_until(lambda: stack.engine_requests() == 0, FREED_S)


def test_disconnect_during_prefill_frees_the_slot(stack: Stack) -> None:
    prompt = "This is a long prompt. " * 1200
    with stack.stream(prompt, max_tokens=1000):
        wait_until(lambda: stack.engine_requests() == 1)
    wait_until(lambda: stack.engine_requests() == 0, FREED_S)


def test_cancel_endpoint_stops_the_engine(stack: Stack) -> None:
    httpx.put(
        f"{stack.url}/predictions/stop-me",
        json={"input": {"prompt": "Tell me a long story.", "max_tokens": 4000}},
        headers={"Prefer": "respond-async"},
    )
    wait_until(lambda: stack.engine_requests() == 1)
    httpx.post(f"{stack.url}/predictions/stop-me/cancel")
    wait_until(lambda: stack.engine_requests() == 0, FREED_S)


def test_seed_gives_the_same_text_alone_and_in_a_batch(stack: Stack) -> None:
    def one(seed: int) -> str:
        # OpenVINO draws from tokens in order of probability; the order of rare ones is no two
        # batches' on a CPU whose sums differ in the last bits.
        sampling = {"temperature": 1, "top_k": 5, "max_tokens": 24}
        return text_of(stack.predict("Invent a name.", seed=seed, **sampling))

    alone = [one(seed) for seed in range(4)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(one, [0, 1, 2, 3, 0, 1, 2, 3]))
    same = [text == other for text, other in zip(alone, together, strict=False)]
    assert sum(same) >= 3, (alone, together)
    assert together[:4] == together[4:]
    assert len(set(together)) > 1


def test_reported_random_seed_reproduces_the_text(stack: Stack) -> None:
    first = stack.predict("Invent a name.", temperature=1, max_tokens=16)
    (line,) = (line for line in first["logs"].splitlines() if "Random seed used" in line)
    seed = int(line.split("`")[1])
    assert text_of(stack.predict("Invent a name.", temperature=1, max_tokens=16, seed=seed)) == (
        text_of(first)
    )


@pytest.mark.parametrize("stop", [" of France", "capital of", "nce is P", "zzz,France"])
def test_output_ends_before_a_stop_sequence(stack: Stack, stop: str) -> None:
    full = "The capital of France is Paris."
    prediction = stack.predict(FRANCE, temperature=0, max_tokens=32, stop_sequences=stop)
    assert text_of(prediction) == full[: full.index(stop.split(",")[-1])]
    assert prediction["metrics"]["finish_reason"] == "stop"
    wait_until(lambda: stack.engine_requests() == 0, FREED_S)


def test_partial_stop_sequence_at_the_end_is_released(stack: Stack) -> None:
    prediction = stack.predict(FRANCE, temperature=0, max_tokens=32, stop_sequences="Paris.!")
    assert text_of(prediction) == "The capital of France is Paris."


def test_max_tokens_ends_with_finish_reason_length(stack: Stack) -> None:
    prediction = stack.predict("Count to one hundred.", temperature=0, max_new_tokens=9)
    assert prediction["metrics"]["output_token_count"] == 9
    assert prediction["metrics"]["finish_reason"] == "length"


def test_min_tokens_continues_past_the_end_token(stack: Stack) -> None:
    prediction = stack.predict(FRANCE, temperature=0, max_tokens=30, min_tokens=30)
    assert prediction["metrics"]["output_token_count"] == 30


def test_clamped_max_tokens_is_logged(stack: Stack) -> None:
    with stack.stream(FRANCE, max_tokens=9000, temperature=0) as events:
        logs = "".join(data["data"] for kind, data in events if kind == "log")
    assert "max_tokens 9000 was clamped to 8155" in logs


def test_prompt_template_input_overrides_the_chat_template(stack: Stack) -> None:
    raw = stack.predict("The capital of France is", prompt_template="{prompt}", max_tokens=1)
    assert raw["metrics"]["input_token_count"] == 5


def test_characters_that_span_tokens_are_joined(stack: Stack) -> None:
    prompt = "Repeat exactly: 日本語 🦙 Übergröße 🎉"
    with stack.stream(prompt, temperature=0, max_tokens=40) as events:
        chunks = [data["chunk"] for kind, data in events if kind == "output"]
    assert any(ord(character) > 127 for chunk in chunks for character in chunk)
    assert "\ufffd" not in "".join(chunks)


def test_log_has_the_lines_of_the_original_and_no_prompt(stack: Stack) -> None:
    secret = "xyzzy-plugh-42"
    logs = stack.predict(secret, max_tokens=4, log_performance_metrics=True)["logs"]
    for line in (
        "Tokens processed: ",
        "Serverside tokens per second: ",
        "Serverside execution time: ",
        "Serverside time to first token: ",
        "Random seed used: ",
    ):
        assert line in logs
    assert secret not in logs
    for log in stack.work_dir.rglob("*.log"):
        assert secret not in log.read_text()


@pytest.mark.parametrize(
    ("values", "code", "words"),
    [
        ({"prompt": " "}, "E1001", ["blank"]),
        ({"prompt": "word " * 9000}, "E1002", ["exceeds maximum input length (8191)"]),
        ({"prompt_template": "no place"}, "E1003", ["{prompt}"]),
        ({"prompt_template": "{prompt} {"}, "E1004", ["brace"]),
        ({"prompt_template": "{prompt} {sytem_prompt}"}, "E1004", ["system_prompt"]),
        ({"repetition_penalty": 0}, "E1005", ["repetition_penalty=0", "greater than 0"]),
        ({"presence_penalty": 3}, "E1005", ["presence_penalty=3", "from -2 to 2"]),
        ({"min_tokens": 1, "min_new_tokens": 2}, "E1101", ["(1)", "(2)"]),
        ({"max_tokens": 1, "max_new_tokens": 2}, "E1102", ["(1)", "(2)"]),
    ],
)
def test_bad_input_gets_its_code_and_leaves_others_running(
    stack: Stack, values: dict[str, Any], code: str, words: list[str]
) -> None:
    wait_until(lambda: stack.engine_requests() == 0)  # of the tests before
    prediction = stack.predict(**{"prompt": "Hi.", **values})
    assert prediction["status"] == "failed"
    for word in [code, *words]:
        assert word in prediction["error"]
    assert stack.engine_requests() == 0


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": "hot"},
        {"temperature": 6},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"seed": "one"},
        {"prompt": 5},
        {"prompt": None},
        {"top_p": [1]},
    ],
)
def test_wrong_types_and_ranges_are_422(stack: Stack, values: dict[str, Any]) -> None:
    assert stack.predict(**{"prompt": "Hi.", **values})["http_status"] == 422


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"input": 3}', b"\xff\xfe"])
def test_malformed_body_is_a_4xx(stack: Stack, body: bytes) -> None:
    response = httpx.post(
        f"{stack.url}/predictions", content=body, headers={"Content-Type": "application/json"}
    )
    assert 400 <= response.status_code < 500


def test_integers_may_be_written_as_floats(stack: Stack) -> None:
    prediction = stack.predict("Hi.", max_tokens=4.0, seed=7.0, top_k=1.0)
    assert prediction["metrics"]["output_token_count"] == 4


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_the_curl_lines_of_the_original_answer_text(stack: Stack, model: str) -> None:
    body = '{"text_input": "What is machine learning?", "max_tokens": 20, "bad_words": "",'
    body += ' "stop_words": ""}'
    answer = httpx.post(f"{stack.triton}/v2/models/{model}/generate", content=body).json()
    assert answer["text_output"].startswith("What is machine learning?\n\nMachine learning is")


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ({"beam_width": 2}, "beam_width=2"),
        ({"temprature": 0.5}, "temperature"),
        ({"return_context_logits": True}, "return_context_logits"),
        ({"lora_task_id": 4}, "lora_task_id"),
        ({"input_lengths": 7}, "input_lengths=7"),
        ({"runtime_top_p": 1.5}, "top_p=1.5"),
        ({"input_ids": [1, 99999999]}, "99999999"),
    ],
)
def test_unsupported_inputs_are_refused_by_name(
    stack: Stack, extra: dict[str, Any], name: str
) -> None:
    values = {"input_ids": [1, 2], "input_lengths": 2, "request_output_len": 2, **extra}
    response = httpx.post(f"{stack.triton}/v2/models/tensorrt_llm/generate", json=values)
    assert response.status_code == 400
    assert "E1005" in response.json()["error"]
    assert name in response.json()["error"]


def test_tensor_contract_without_streaming(stack: Stack) -> None:
    values = {
        "input_ids": [28120, 314],
        "input_lengths": 2,
        "request_output_len": 3,
        "end_id": -1,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_log_probs": True,
    }
    url = f"{stack.triton}/v2/models/tensorrt_llm/generate"
    answer = httpx.post(url, json=values).json()
    assert answer["output_ids"][:2] == [28120, 314]
    assert len(answer["output_ids"]) == answer["sequence_length"] == 5
    assert (answer["num_input_tokens"], answer["num_output_tokens"]) == (2, 3)
    assert len(answer["output_log_probs"]) == 3
    assert answer["cum_log_probs"] == pytest.approx(sum(answer["output_log_probs"]), abs=1e-4)
    bare = httpx.post(url, json={**values, "exclude_input_in_output": True}).json()
    assert bare["output_ids"] == answer["output_ids"][2:]
    word = answer["output_ids"][3:5]
    stopped = httpx.post(
        url,
        json={**values, "exclude_input_in_output": True, "stop_words_list": [*word, 2, -1]},
    ).json()
    assert stopped["output_ids"] == answer["output_ids"][2]


def test_stop_by_request_id_ends_a_running_request(stack: Stack) -> None:
    url = f"{stack.triton}/v2/models/tensorrt_llm/generate_stream"
    values = {"input_ids": [1], "input_lengths": 1, "request_output_len": 5000, "end_id": -1}
    with httpx.stream(
        "POST", url, json={**values, "streaming": True, "id": "me"}, timeout=30
    ) as response:
        lines = (line for line in response.iter_lines() if line)
        for _ in range(3):
            assert "output_ids" in json.loads(next(lines)[6:])
        httpx.post(url, json={**values, "id": "me", "stop": True})
        assert len(list(lines)) < 200
    wait_until(lambda: stack.engine_requests() == 0, FREED_S)
