"""benchmarks/gpu against a scripted server: load, endpoints, rounds and percentiles."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from http_replies import serving
from script_modules import BENCHMARKS, imported

from cog_triton.bench.request_record import Record


@pytest.fixture(scope="module")
def gpu() -> Iterator[SimpleNamespace]:
    with imported(BENCHMARKS, ("prompts", "endpoints", "load", "processes", "bench")) as modules:
        yield modules


def chunks(request: BaseHTTPRequestHandler, *parts: str) -> None:
    """A chunked answer, each part sent by itself."""
    request.protocol_version = "HTTP/1.1"
    request.send_response(200)
    request.send_header("Transfer-Encoding", "chunked")
    request.end_headers()
    for part in (*parts, ""):
        content = part.encode()
        request.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
        request.wfile.flush()


def event(value: Any, name: str = "") -> str:
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(value)}\n\n"


def read(request: BaseHTTPRequestHandler) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
    return body


def completions(request: BaseHTTPRequestHandler) -> None:
    """Says "a" as often as asked, and counts one less for the prompt "lie"."""
    body = read(request)
    count = body["max_tokens"] - (body["prompt"] == "lie")
    told = [event({"choices": [{"text": "a"}], "usage": None}) for _ in range(count)]
    usage = {"prompt_tokens": 2, "completion_tokens": count}
    chunks(request, *told, event({"choices": [], "usage": usage}), "data: [DONE]\n\n")


def answer_of(gpu: SimpleNamespace, endpoint: Any, prompt: Any, tokens: int) -> bytes:
    answer: bytes = asyncio.run(gpu.load.ask(endpoint, prompt, tokens))[1]
    return answer


def test_every_request_is_made_once_and_every_token_counted(gpu: SimpleNamespace) -> None:
    prompts = [gpu.prompts.Prompt(f"p{number}", [1, 2]) for number in range(5)]
    with serving(completions) as url:
        endpoint = gpu.endpoints.Endpoint("it", urlsplit(url).port)
        measured = gpu.load.measure(endpoint, prompts, requests=10, concurrency=3, max_tokens=7)
    assert measured.errors == []
    assert (measured.requests, measured.concurrency, measured.endpoint) == (10, 3, "it")
    assert measured.tokens_per_s == pytest.approx(70 / measured.seconds, rel=0.01)
    assert 0 < measured.ttft_p50 <= measured.ttft_p99
    assert 1 <= measured.tokens_per_read <= 7


def test_an_answer_with_a_token_too_few_is_an_error(gpu: SimpleNamespace) -> None:
    prompts = [gpu.prompts.Prompt(text, [1, 2]) for text in ("a", "lie")]
    with serving(completions) as url:
        endpoint = gpu.endpoints.Endpoint("it", urlsplit(url).port)
        measured = gpu.load.measure(endpoint, prompts, requests=4, concurrency=1, max_tokens=7)
    assert measured.requests == 2
    assert [error.split(":")[1] for error in measured.errors] == [
        " 6 of 7 tokens for 2 of 2",
        " 6 of 7 tokens for 2 of 2",
    ]


@pytest.mark.parametrize(
    ("kind", "told", "output"),
    [
        (
            "Endpoint",
            [
                event({"choices": [{"text": "a b"}]}),
                event({"choices": [{"text": " c"}]}),
                event({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}),
            ],
            "a b c",
        ),
        (
            "Predictions",
            [
                event("a b", "output"),
                event(
                    {
                        "output": ["a b", " c"],
                        "metrics": {"input_token_count": 2, "output_token_count": 3},
                    },
                    "completed",
                ),
            ],
            "a b c",
        ),
        (
            "TritonIds",
            [event({"output_ids": 5}), event({"output_ids": [6, 7]}), event({"output_ids": []})],
            [5, 6, 7],
        ),
        (
            "TritonText",
            [
                event({"text_output": "a ", "num_input_tokens": 2, "num_output_tokens": 1}),
                event({"text_output": "b c", "num_input_tokens": 2, "num_output_tokens": 2}),
            ],
            "a b c",
        ),
    ],
)
def test_endpoints_extract_the_output_of_an_answer(
    gpu: SimpleNamespace, kind: str, told: list[str], output: Any
) -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        read(request)
        compact = [part.replace(": 2", ":2").replace(": [", ":[").replace(": 5", ":5")
                   .replace(": 1", ":1") for part in told]  # fmt: skip
        chunks(request, *compact)

    with serving(answer) as url:
        endpoint = getattr(gpu.endpoints, kind)("it", urlsplit(url).port)
        whole = answer_of(gpu, endpoint, gpu.prompts.Prompt("p", [1, 2]), 3)
    assert endpoint.output(whole) == output


def share(gpu: SimpleNamespace, *streams: list[float], **more: Any) -> Any:
    """One process's streams by the times of their reads, asked for at 0, of two tokens a read."""
    records = []
    for times in streams:
        record = Record(0, 0.0, ended=times[-1], output_tokens=2 * len(times))
        for at in times:
            record.output(at, 1)
        records.append(record)
    return gpu.load.WorkerResult(records, **{"ended": 1.0, **more})


def test_measurements_of_processes_are_merged(gpu: SimpleNamespace) -> None:
    first = share(gpu, [0.3, 0.31], [0.1, 0.13], began=5.0, ended=6.0)
    second = share(gpu, [0.2, 0.22], began=4.0, ended=5.5)
    measured = gpu.load.combine("it", 2, [first, second])
    assert (measured.ttft_p50, measured.itl_p50, measured.seconds) == (200, 20, 2)
    assert measured.ttft_mean == 200
    assert measured.itl_p99 == pytest.approx(29.8)
    assert (measured.tokens_per_s, measured.tokens_per_read, measured.requests) == (6, 2, 3)


def test_goodput_counts_requests_within_the_slo(gpu: SimpleNamespace) -> None:
    late = share(gpu, [2.1, 2.2], [1.9, 2.0, 2.03], [0.1, 0.5], ended=2.0)
    assert gpu.load.combine("it", 3, [late]).goodput == 0.5


def test_every_endpoint_gets_the_same_prompts(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int, list[str]]] = []

    def measure(
        endpoint: Any, prompts: list[Any], requests: int, concurrency: int, max_tokens: int
    ) -> Any:
        if max_tokens == gpu.bench.OUTPUT_TOKENS:
            asked.append((endpoint.name, concurrency, [prompt.text for prompt in prompts]))
        return gpu.load.combine(endpoint.name, concurrency, [gpu.load.WorkerResult(ended=1.0)])

    monkeypatch.setattr(gpu.bench, "measure", measure)
    endpoints = [(gpu.endpoints.Endpoint(name, 1), dict) for name in ("one", "two")]
    prompts = [gpu.prompts.Prompt(str(number), [number]) for number in range(100)]
    bench = gpu.bench.Bench(endpoints, prompts, lambda row: None)
    assert bench.round(0, [1, 8], time.monotonic() + 60)
    assert bench.round(1, [1], time.monotonic() + 60)
    assert [(name, at_once) for name, at_once, _ in asked] == [
        ("one", 1), ("two", 1), ("two", 8), ("one", 8), ("two", 1), ("one", 1),
    ]  # fmt: skip
    texts = [tuple(given) for _, _, given in asked]
    assert texts[0::2] == texts[1::2]
    assert len({text for given in texts[::2] for text in given}) == 4 + 16 + 4


def test_ttft_of_single_requests_is_that_of_short_ones(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(endpoint: Any, prompts: Any, requests: int, at_once: int, tokens: int) -> Any:
        ttft = 0.5 if tokens == gpu.bench.OUTPUT_TOKENS else 0.02
        record = Record(0, 0.0, output_tokens=tokens)
        record.output(ttft, 1)
        worker = gpu.load.WorkerResult([record], ended=1.0)
        return gpu.load.combine(endpoint.name, at_once, [worker])

    monkeypatch.setattr(gpu.bench, "measure", measure)
    kept: list[dict[str, Any]] = []
    endpoints = [(gpu.endpoints.Endpoint("/v1", 1), dict)]
    bench = gpu.bench.Bench(endpoints, [gpu.prompts.Prompt("a", [1])], kept.append)
    assert bench.round(0, [1, 64], time.monotonic() + 60)
    assert [row["ttft_p50"] for row in kept] == [20, 500]
    assert [row["tokens_per_s"] for row in kept] == [256, 256]


def test_no_endpoint_is_asked_for_more_at_once_than_it_takes(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def measure(endpoint: Any, prompts: Any, requests: int, at_once: int, tokens: int) -> Any:
        asked.append((endpoint.name, at_once))
        return gpu.load.combine(endpoint.name, at_once, [gpu.load.WorkerResult(ended=1.0)])

    monkeypatch.setattr(gpu.bench, "measure", measure)
    endpoints = [
        (gpu.endpoints.Endpoint("/v1", 1), dict),
        (gpu.endpoints.Predictions("cog", 1), dict),
    ]
    bench = gpu.bench.Bench(endpoints, [gpu.prompts.Prompt("a", [1])], lambda row: None)
    bench.warm_up(512)
    assert asked == [("/v1", 512), ("cog", 480)]
    assert bench.round(0, [480, 512], time.monotonic() + 60)
    assert sorted(asked[2:]) == [("/v1", 480), ("/v1", 512), ("cog", 480)]


def test_a_load_process_that_dies_is_an_error(gpu: SimpleNamespace) -> None:
    shares = [
        gpu.load.WorkerResult(errors=["ended with -9"]),
        share(gpu, [1.0, 2.0, 3.0, 4.0], began=1, ended=3),
    ]
    measured = gpu.load.combine("it", 2, shares)
    assert (measured.tokens_per_s, measured.errors) == (4, ["ended with -9"])
    with pytest.raises(RuntimeError, match="ended with -9"):
        gpu.load.combine("it", 2, shares[:1])


def test_cpu_time_is_summed_by_role(gpu: SimpleNamespace) -> None:
    roles = {1: "engine", 2: "stub", 3: "stub"}
    used = gpu.processes.cores(roles, {1: 1.0, 2: 1.0}, {1: 5.0, 2: 2.0, 3: 1.0}, seconds=2.0)
    assert used == {"engine": 2.0, "stub": 1.0}
