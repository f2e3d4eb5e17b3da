"""Benchmark targets: the requests sent to each kind of server, and how answers are counted."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from bench_runs import options
from command_line import ran
from scripted_server import (
    HANG,
    RESET,
    Answer,
    Part,
    Request,
    ScriptedServer,
    event,
    serving,
    stream,
    whole,
)

from cog_triton.bench.http_client import (
    BufferedResponse,
    Client,
    TransportError,
    now,
)
from cog_triton.bench.options import OutputMethod, Prompt, TargetName
from cog_triton.bench.request_record import FAILED, OK, Record
from cog_triton.bench.targets import KINDS
from cog_triton.errors import CogTritonError
from cog_triton.system.ports import free_ports

ASKED = Prompt("one two", (7, 8), 5)


async def _measure(url: str, prompt: Prompt, changes: dict[str, Any]) -> tuple[Record, Any]:
    client = Client(5)
    try:
        own = options(url=url, **changes)
        target = KINDS[own.target](own, client)
        await target.prepare()
        record = Record(index=0, scheduled=now())
        await target.measure(prompt, record)
        return record, target
    finally:
        client.close()


def measure(
    answer: Answer, prompt: Prompt = ASKED, **changes: Any
) -> tuple[Record, list[Request], list[str]]:
    """The record, the requests after those that prepare, and the target's notes."""
    with serving(answer) as server:
        record, target = asyncio.run(_measure(server.url, prompt, changes))
    posted = [request for request in server.requests if request.body]
    assert record.ended >= record.sent >= record.scheduled
    return record, posted, target.notes


def refusal(answer: Answer, **changes: Any) -> str:
    with serving(answer) as server, pytest.raises(CogTritonError) as caught:
        asyncio.run(_measure(server.url, ASKED, changes))
    return str(caught.value)


def of_cog(*names: str, streaming: bool = True, health: str = "READY") -> dict[str, bytes]:
    """What a Cog server tells of itself."""
    post = {"x-cog-streaming": True} if streaming else {}
    document = {
        "paths": {"/predictions": {"post": post}},
        "components": {"schemas": {"Input": {"properties": {key: {} for key in names}}}},
    }
    return {
        "/openapi.json": whole(json.dumps(document).encode()),
        "/health-check": whole(json.dumps({"status": health}).encode()),
    }


def by_path(known: dict[str, bytes], parts: list[Part]) -> Any:
    return lambda request: [known[request.path]] if request.path in known else parts


USUAL = ("prompt", "max_tokens", "min_tokens", "messages")
METRICS = {"input_token_count": 37, "output_token_count": 5, "time_to_first_token": 0.1}


def prediction(status: str = "succeeded", **values: Any) -> bytes:
    data = {"status": status, "metrics": {"predict_time": 0.5, **METRICS}, **values}
    return b"event: completed\ndata: " + json.dumps(data).encode() + b"\n\n"


OUTPUT = b'event: output\ndata: {"chunk": "a"}\n\n'
STREAM = stream(b"event: start\ndata: {}\n\n", OUTPUT, OUTPUT + OUTPUT, prediction())


def test_cog_streamed_answers_are_counted() -> None:
    record, (request,), notes = measure(by_path(of_cog(*USUAL), STREAM))
    assert request.path == "/predictions"
    assert request.json == {"input": {"prompt": "one two", "max_tokens": 5, "min_tokens": 5}}
    assert (record.status, record.error) == (OK, "")
    assert (record.input_tokens, record.output_tokens, record.wanted_tokens) == (37, 5, 5)
    assert sum(record.counts) == 3
    assert record.ttft is not None
    assert record.sent < record.times[0] <= record.ended
    assert record.server["predict_time"] == 0.5
    assert notes == []


def test_cog_whole_answers_are_counted() -> None:
    body = json.dumps({"status": "succeeded", "metrics": METRICS, "output": ["a"]}).encode()
    for known, changes in (
        (of_cog(*USUAL), {"output_method": OutputMethod.WAIT}),
        (of_cog(*USUAL, streaming=False), {}),
    ):
        record, _, notes = measure(by_path(known, [whole(body)]), **changes)
        assert (record.status, record.ttft, record.output_tokens) == (OK, None, 5)
        assert bool(notes) is not bool(changes)


def test_a_mock_server_gets_its_own_inputs() -> None:
    known = of_cog("prompt", "n_output_tokens", "tps", "output_method", "buffer_size", "max_tokens")
    wanted = {"tps": 100.0, "inputs": {"output_method": "buffer", "buffer_size": 4}}
    _, (request,), notes = measure(by_path(known, STREAM), **wanted)
    assert request.json["input"] == {
        "prompt": "one two",
        "n_output_tokens": 5,
        "tps": 100.0,
        "output_method": "buffer",
        "buffer_size": 4,
    }
    assert notes == []
    _, (request,), _ = measure(by_path(known, STREAM))
    given = {"prompt": "one two", "n_output_tokens": 5, "output_method": "yield"}
    assert request.json["input"] == given


def test_other_servers_do_not_get_inputs_of_the_mock() -> None:
    _, (request,), notes = measure(by_path(of_cog(*USUAL), STREAM), tps=100.0)
    assert request.json["input"].keys() == {"prompt", "max_tokens", "min_tokens"}
    assert notes == ["--tps is not sent: the server has no such input"]
    known = of_cog("prompt", "max_new_tokens", "top_k")
    _, (request,), _ = measure(by_path(known, STREAM), inputs={"top_k": 1})
    assert request.json["input"] == {"prompt": "one two", "max_new_tokens": 5, "top_k": 1}


@pytest.mark.parametrize(
    ("known", "changes", "says"),
    [
        (
            of_cog(*USUAL, health="STARTING"),
            {},
            "E1400 .*health-check says STARTING; start it with",
        ),
        ({"/openapi.json": whole(b'{"paths": {"/v1": {}}}')}, {}, "E1400 .*is not Cog's"),
        ({"/openapi.json": whole(b"<html>")}, {}, "E1400 .*is not Cog's"),
        (of_cog("prompt"), {"inputs": {"tpo_k": 1}}, "E1005 .*--input tpo_k: .*it has prompt"),
    ],
)
def test_servers_that_cannot_be_measured_are_refused(
    known: dict[str, bytes], changes: dict[str, Any], says: str
) -> None:
    assert re.search(says, refusal(by_path(known, STREAM), **changes))


@pytest.mark.parametrize("name", [TargetName.COG, TargetName.TRITON, TargetName.OPENAI])
def test_an_absent_server_is_e1400(name: TargetName) -> None:
    (port,) = free_ports(1)
    with pytest.raises(CogTritonError, match=r"E1400 .*cannot connect.*cog-triton serve"):
        asyncio.run(_measure(f"http://127.0.0.1:{port}", ASKED, {"target": name}))


def of_triton(model: str, inputs: list[str], outputs: list[str]) -> dict[str, bytes]:
    config = {
        "input": [{"name": name} for name in inputs],
        "output": [{"name": name} for name in outputs],
    }
    return {
        f"/v2/models/{model}/ready": whole(b""),
        f"/v2/models/{model}/config": whole(json.dumps(config).encode()),
    }


DIRECT = of_triton("tensorrt_llm", ["input_ids", "exclude_input_in_output"], ["output_ids"])
TEXT = of_triton("ensemble", ["text_input", "exclude_input_in_output"], ["text_output"])
TRITON = {"target": TargetName.TRITON}


def test_triton_engine_model_gets_token_ids() -> None:
    parts = stream(
        event(output_ids=1), event(output_ids=[2, 3]) + event(output_ids=[4]), event(output_ids=[])
    )
    record, (request,), notes = measure(by_path(DIRECT, parts), model="tensorrt_llm", **TRITON)
    assert request.path == "/v2/models/tensorrt_llm/generate_stream"
    assert request.json == {
        "input_ids": [7, 8],
        "input_lengths": 2,
        "request_output_len": 5,
        "streaming": True,
        "exclude_input_in_output": True,
        "end_id": -1,
    }
    assert (record.status, record.input_tokens, record.output_tokens) == (OK, 2, 4)
    assert sum(record.counts) == 4
    assert "random" in notes[0]


def test_triton_ensemble_gets_text() -> None:
    parts = stream(event(text_output="a"), event(text_output=""))
    record, (request,), notes = measure(by_path(TEXT, parts), **TRITON)
    assert request.path == "/v2/models/ensemble/generate_stream"
    assert request.json == {
        "text_input": "one two",
        "max_tokens": 5,
        "bad_words": "",
        "stop_words": "",
        "stream": True,
        "exclude_input_in_output": True,
        "end_id": -1,
    }
    assert (record.status, record.output_tokens) == (OK, 2)
    assert "counts as a token" in notes[0]


def of_openai(*models: str, ignores: bool = True) -> dict[str, bytes]:
    names = json.dumps({"data": [{"id": name} for name in models]}).encode()
    fields = b'{"ignore_eos": {}}' if ignores else b"{}"
    return {"/v1/models": whole(names), "/openapi.json": whole(fields)}


def delta(text: str | None) -> bytes:
    return event(choices=[{"delta": {"role": "assistant", "content": text}}], usage=None)


USAGE = event(choices=[], usage={"prompt_tokens": 11, "completion_tokens": 6})
DONE = b"data: [DONE]\n\n"
CHAT = stream(delta(""), delta("a"), delta('"content": ""') + delta("b"), delta(None), USAGE, DONE)
OPENAI = {"target": TargetName.OPENAI}


def test_openai_chat_is_streamed_with_usage() -> None:
    record, (request,), notes = measure(by_path(of_openai("small"), CHAT), **OPENAI)
    assert request.path == "/v1/chat/completions"
    assert request.json == {
        "model": "small",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "one two"}],
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert (record.status, record.input_tokens, record.output_tokens) == (OK, 11, 6)
    assert sum(record.counts) == 3
    assert notes == []


def test_openai_whole_answers_are_counted() -> None:
    body = {"choices": [{}], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}
    known = of_openai("a", "b", ignores=False)
    record, (request,), notes = measure(
        by_path(known, [whole(json.dumps(body).encode())]),
        **{**OPENAI, "model": "b", "output_method": OutputMethod.WAIT, "inputs": {"seed": 1}},
    )
    assert request.json.items() >= {"model": "b", "max_tokens": 5, "seed": 1}.items()
    assert not {"stream", "ignore_eos"} & request.json.keys()
    assert (record.status, record.output_tokens, record.ttft) == (OK, 3, None)
    assert "may end early" in notes[0]


def test_openai_invalid_options_are_refused() -> None:
    assert "name one of the server's: a, b" in refusal(by_path(of_openai("a", "b"), CHAT), **OPENAI)
    no_key = {"/v1/models": whole(b"{}", "401 Unauthorized")}
    assert "E1007 Unauthorized" in refusal(by_path(no_key, CHAT), **OPENAI)


FAILURES: dict[TargetName, list[tuple[list[Part], str]]] = {
    TargetName.COG: [
        ([whole(b'{"detail": "busy"}', "409 Conflict")], "HTTP 409"),
        (stream(prediction("failed", error="Prediction failed: E2107 Overloaded: full")), "E2107"),
        (stream(prediction("canceled")), "canceled"),
        (stream(OUTPUT), "stream ended early"),
        ([whole(b"[1]")], "malformed answer"),
        ([*stream(OUTPUT, end=False), object()], "connection closed"),
    ],
    TargetName.TRITON: [
        (stream(event(error="E1002 PromptTooLong: 9 > 8"), status="400 Bad Request"), "E1002"),
        (stream(event(output_ids=1), event(error="engine died")), "error event"),
        ([whole(b'{"error": "no"}', "500 Internal Server Error")], "HTTP 500"),
    ],
    TargetName.OPENAI: [
        (stream(delta("a"), event(error={"message": "E2105 TritonUnavailable: died"})), "E2105"),
        (stream(delta("a")), "stream ended early"),
        ([whole(b'{"error": {"message": "x"}}', "429 Too Many Requests")], "HTTP 429"),
    ],
}


@pytest.mark.parametrize(
    ("target", "parts", "code"),
    [(target, parts, code) for target, rows in FAILURES.items() for parts, code in rows],
)
def test_failures_have_codes(target: TargetName, parts: list[Part], code: str) -> None:
    model = "tensorrt_llm" if target is TargetName.TRITON else None
    known = {**of_cog(*USUAL), **DIRECT, **of_openai("x")}
    known["/openapi.json"] = of_cog(*USUAL)["/openapi.json"]
    record, _, _ = measure(by_path(known, parts), target=target, model=model)
    assert (record.status, record.code) == (FAILED, code)
    assert record.error


def test_numbers_are_read_from_a_prediction_log() -> None:
    log = (
        "Tokens processed: 5\nServerside tokens per second: 95.56\n"
        "Serverside execution time: 1.34 seconds\nServerside time to first token: 0.01 seconds\n"
    )
    parts = stream(OUTPUT, prediction(metrics={}, logs=log))
    record, _, _ = measure(by_path(of_cog(*USUAL), parts))
    assert record.server == {
        "tokens_per_second": 95.56,
        "predict_time": 1.34,
        "time_to_first_token": 0.01,
        "output_token_count": 5,
    }
    assert record.output_tokens == 5


def test_api_keys_are_not_in_outputs() -> None:
    assert "r8_key" not in repr(options(api_key="r8_key"))


def talk(answer: Answer, work: Callable[[str, Client], Coroutine[Any, Any, Any]]) -> Any:
    async def main(url: str) -> Any:
        client = Client(60)
        try:
            return await work(url, client)
        finally:
            client.close()

    with serving(answer) as server:
        return asyncio.run(main(server.url)), server


def test_a_request_is_sent_and_its_answer_buffered() -> None:
    async def work(url: str, client: Client) -> BufferedResponse:
        return await client.fetch("POST", f"{url}/a?b=c", {"X-Y": "z"}, b'{"n": 1}')

    answer, server = talk([whole(b"hello", "201 Created")], work)
    assert (answer.status, answer.text) == (201, b"hello")
    assert answer.headers[b"content-type"] == b"application/json"
    (request,) = server.requests
    assert (request.path, request.json) == ("/a?b=c", {"n": 1})


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", RESET], "connection closed"),
        ([RESET], "connection closed"),
        ([b"SSH-2.0-x\r\n\r\n", HANG], "not HTTP"),
        ([HANG], "timeout"),
        (stream(b"abc", HANG), "timeout"),
    ],
)
def test_incomplete_answers_are_transport_errors(answer: Answer, kind: str) -> None:
    async def work(url: str, client: Client) -> str:
        client.timeout = 0.3
        with pytest.raises(TransportError) as caught:
            await client.fetch("GET", url, {})
        return caught.value.kind

    found, _ = talk(answer, work)
    assert found == kind


def test_a_cancelled_request_closes_its_connection() -> None:
    arrived = Event()

    def answer(_: Request) -> list[Part]:
        arrived.set()
        return [HANG]

    async def work(url: str, client: Client) -> None:
        task = asyncio.create_task(client.fetch("GET", url, {}))
        assert await asyncio.to_thread(arrived.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    _, server = talk(answer, work)
    assert server.requests[0].left.wait(60)


BENCH = [sys.executable, "-m", "cog_triton", "bench", "--url"]
ENDLESS = ["--warmup", "0", "--unit", "concurrency", "--rate", "1", "--duration", "60"]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving(by_path(of_cog(*USUAL), STREAM)) as found:
        yield found


def run(*arguments: object) -> tuple[int, str]:
    result = ran("bench", *arguments, columns=400)
    return result.exit_code, result.output


def test_the_command_line_of_the_original(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PORT", server.url.rpartition(":")[2])
    line = (
        "--unit batch --duration 0.2 --tps 100 --n-output-tokens 128 --output-method yield --rate 6"
    )
    code, said = run(*line.split())
    assert code == 0
    assert "Load: 6 batch on cog-triton at " in said
    assert "Requests: 6 completed, 0 failed" in said
    assert "--tps is not sent: the server has no such input." in said


def test_a_json_file_is_written(server: ScriptedServer, tmp_path: Path) -> None:
    code, _ = run(
        *("--url", server.url, "--unit", "concurrency", "--rate", 2, "--requests", 6),
        *("--json", tmp_path / "a.json"),
        *("--n-input-tokens", "uniform:3-5", "--input", "max_tokens=7"),
    )
    assert code == 0
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["runs"][0]["completed"] == 6
    posted = [request.json["input"] for request in server.requests if request.body]
    assert len(posted) == 7  # one warms up
    assert {item["max_tokens"] for item in posted} == {7}
    assert all(3 <= len(item["prompt"].split()) <= 5 for item in posted)
    assert len({item["prompt"] for item in posted}) > 3


def test_ctrl_c_reports_the_requests_so_far() -> None:
    parts = [*STREAM[:2], HANG]

    def answer(request: object) -> list[object]:
        path = getattr(request, "path", "")
        posted = sum(bool(item.body) for item in server.requests)
        known = of_cog(*USUAL)
        return [known[path]] if path in known else STREAM if posted <= 2 else parts

    with serving(answer) as server:  # type: ignore[arg-type]
        process = subprocess.Popen(
            [*BENCH, server.url, *ENDLESS],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            arrived(server, 5)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 130
    assert "Requests: interrupted; 2 completed, 0 failed, 1 cut off" in said


def arrived(server: ScriptedServer, count: int) -> None:
    """Wait for that many requests, past the start of a process on a busy machine."""
    deadline = time.monotonic() + 60
    while len(server.requests) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--n-input-tokens 0", "E1005 InvalidArgument: --n-input-tokens='0': must be N or uniform"),
        ("--json /nowhere/x.json", "--json='/nowhere/x.json': its directory does not exist"),
        ("--tokenizer /nowhere", "was removed: use aiperf"),
        ("--url localhost:5000", "--url='localhost:5000': must be http(s)://"),
    ],
)
def test_invalid_options_are_refused_by_name(arguments: str, says: str) -> None:
    code, said = run(*arguments.split())
    assert code == 1
    assert says in said
    assert "Traceback" not in said
