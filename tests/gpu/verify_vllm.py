"""Serve a Llama of random weights through our vLLM family, and beside it through `vllm serve`.

    scripts/verify-vllm [--engine-python PYTHON] [--triton] [--no-baseline] [--json FILE]

Without --triton our host of AsyncLLM is spoken to directly, as Triton's stubs do; with it the whole
stack is started. First what must hold is checked: streams, ends, errors, cancellation, measures,
and that greedy decoding gives the same tokens by every way. Then the same load is run on each way.
Exit code 0 only if every check held.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_engines import EOS, tokenizer
from vllm_load import Measured, measure, post

from cog_triton.engines.base import EngineRequest
from cog_triton.engines.engine_process import EngineLink, EngineProcess
from cog_triton.engines.vllm.messages import MetricsRequest, TextRequest
from cog_triton.engines.vllm.peers import connect
from cog_triton.engines.vllm.sampling import from_client
from cog_triton.errors import CogTritonError, InvalidArgument, PromptTooLong
from cog_triton.sampling import SamplingParams

HOST = "cog_triton.engines.vllm.host:VLLMHost"
MAX_MODEL_LEN = 4096
START_TIMEOUT_S = 480
PATIENCE_S = 120
PROMPT = list(b"The quick brown fox jumps over the lazy dog. " * 3)[:128]
# Llama 3.2 1B, but for its vocabulary.
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 320,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": EOS,
    "eos_token_id": EOS,
}


def make_engine(directory: Path, arguments: dict[str, Any]) -> Path:
    """An engine directory whose weights vLLM makes up, always the same."""
    directory.mkdir()
    tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps(SHAPE))
    (directory / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}'
    )
    (directory / "model.json").write_text(json.dumps(arguments))
    return directory


class Checks:
    """Prints each thing that was looked at, and remembers whether all held."""

    def __init__(self) -> None:
        self.held: dict[str, bool] = {}

    def __call__(self, name: str, holds: bool, seen: object = "") -> None:
        self.held[name] = bool(holds)
        print(f"{'ok  ' if holds else 'FAIL'}  {name}  {seen if not holds else ''}", flush=True)


def ask(link: EngineLink, handle: int, request: Any) -> list[Any]:
    """All events of one request."""
    inbox: queue.Queue[Any] = queue.Queue()
    link.submit(handle, request, inbox.put)
    return until_end(inbox)


def until_end(inbox: queue.Queue[Any]) -> list[Any]:
    """Events up to the last one of a request."""
    events = [inbox.get(timeout=PATIENCE_S)]
    while events[-1].finish is None and events[-1].error is None:
        events.append(inbox.get(timeout=PATIENCE_S))
    return events


def tokens(max_tokens: int, **values: Any) -> EngineRequest:
    """A greedy request of PROMPT that no end of sequence cuts short."""
    sampling = SamplingParams(max_tokens=max_tokens, **values.pop("sampling", {}))
    return EngineRequest(**{"input_ids": PROMPT, "end_id": -1, **values, "sampling": sampling})


def check_host(link: EngineLink, guest: EngineLink, check: Checks) -> list[int]:
    """What the host must do for both contracts; returns the greedy tokens."""
    numbers = iter(range(1, 1000))

    def ids(request: EngineRequest) -> list[int]:
        return [token for event in ask(link, next(numbers), request) for token in event.token_ids]

    def refused(request: Any) -> CogTritonError | None:
        error: CogTritonError | None = ask(link, next(numbers), request)[-1].error
        return error

    events = ask(link, next(numbers), tokens(32))
    greedy = [token for event in events for token in event.token_ids]
    check("a stream brings every token", len(greedy) == 32 and len(events) > 8, events)
    check("it ends by length", events[-1].finish == "length", events[-1])
    check("without streaming it is the same", ids(tokens(32, streaming=False)) == greedy)
    stop = tuple(greedy[10:12])
    cut = ids(tokens(32, stop_words=(stop,)))
    check("stop words are cut", len(cut) <= 10 and cut == greedy[: len(cut)], cut)
    ended = ask(link, next(numbers), tokens(32, end_id=greedy[5]))
    check("end_id ends and is cut", greedy[5] not in [t for e in ended for t in e.token_ids], ended)
    bad = ids(tokens(32, bad_words=((greedy[0],),)))
    check("bad words are not generated", greedy[0] not in bad, bad)
    likely = ask(link, next(numbers), tokens(4, return_log_probs=True))
    check("log probabilities", all(p < 0 for e in likely for p in e.log_probs), likely)
    seeded = {"temperature": 1.0, "top_p": 0.9, "seed": 2**64 - 2}
    one, two = (ids(tokens(32, sampling=seeded)) for _ in range(2))
    check("a seed repeats itself", one == two and one != greedy, (one, two))
    long = EngineRequest(input_ids=[1] * MAX_MODEL_LEN, sampling=SamplingParams(max_tokens=1))
    check("a prompt too long is E1002", isinstance(refused(long), PromptTooLong))
    hot = tokens(4, sampling={"temperature": 9.0, "top_p": 0.5})
    check("what vLLM refuses is E1005", isinstance(refused(hot), InvalidArgument), refused(hot))

    sampling = from_client({"temperature": "0", "max_tokens": "32", "ignore_eos": True})
    prompt = bytes(PROMPT).decode()
    text = TextRequest(prompt=prompt, sampling=sampling, stream=True)
    streamed = ask(guest, 1, text)
    whole = ask(guest, 2, TextRequest(prompt=prompt, sampling=sampling))
    check("text comes whole", sum(whole[-1].output_token_counts) == 32, whole)
    check("and the same in a stream", "".join(e.texts[0] for e in streamed) == whole[-1].texts[0])
    check("both contracts count alike", whole[-1].input_token_count == len(PROMPT), whole)
    choice = from_client({"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 8})
    chosen = ask(guest, 3, TextRequest(prompt="Is it so? ", sampling=choice))[-1]
    check("structured outputs", chosen.error is None and chosen.texts[0] in ("yes", "no"), chosen)

    ask(guest, 4, MetricsRequest())
    inbox: queue.Queue[Any] = queue.Queue()
    link.submit(next(numbers), tokens(MAX_MODEL_LEN - len(PROMPT)), inbox.put)
    handle = next(numbers) - 1
    inbox.get(timeout=PATIENCE_S)
    link.cancel(handle)
    check("a request can be cancelled", until_end(inbox)[-1].finish == "cancelled")
    generated = counted(guest, 5)
    time.sleep(2)
    check("and vLLM generates no more for it", counted(guest, 6) < 64, generated)
    ask(guest, 7, MetricsRequest())
    ids(tokens(16))
    time.sleep(0.5)
    (event,) = ask(guest, 8, MetricsRequest())
    check("tokens are counted", sum(event.values["vllm:generation_tokens_total"]) == 16, event)
    check("every metric of the seed", len(event.values) == 9, sorted(event.values))
    return greedy


def counted(guest: EngineLink, handle: int) -> float:
    """Tokens generated since the last time."""
    (event,) = ask(guest, handle, MetricsRequest())
    return float(sum(event.values.get("vllm:generation_tokens_total", [0])))


@contextmanager
def our_host(directory: Path, python: str | None) -> Iterator[tuple[EngineLink, EngineLink]]:
    """Our host of AsyncLLM without Triton: its owner's connection, and a guest's."""
    name = f"verify-vllm-{time.time_ns()}"
    parameters = {"engine_dir": str(directory), "socket": name}
    engine = EngineProcess(HOST, parameters | ({"engine_python": python} if python else {}))
    try:
        connection = connect(name)
        guest = EngineLink(connection, connection.recv(), lambda: None)
        yield engine, guest
        guest.close()
    finally:
        engine.close()


def load_of_link(link: EngineLink, max_tokens: int) -> Callable[[int], Any]:
    """Requests over a connection of the host's."""

    async def one(number: int) -> float:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        started, first = time.perf_counter(), [0.0]

        def emit(event: Any) -> None:
            first[0] = first[0] or time.perf_counter() - started
            if event.finish is not None or event.error is not None:
                loop.call_soon_threadsafe(done.set)

        link.submit(10_000 + number, tokens(max_tokens, input_ids=prompt(number)), emit)
        await done.wait()
        return first[0]

    return one


def load_of_triton(port: int, max_tokens: int) -> Callable[[int], Any]:
    """Requests over HTTP to the model tensorrt_llm."""

    async def one(number: int) -> float:
        ids = prompt(number)
        body = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": max_tokens}
        body |= {"end_id": -1, "streaming": True}
        return (await post(port, "/v2/models/tensorrt_llm/generate_stream", body))[0]

    return one


def load_of_text(port: int, max_tokens: int) -> Callable[[int], Any]:
    """Requests over HTTP to the model vllm_model."""

    async def one(number: int) -> float:
        sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
        body = {"text_input": bytes(prompt(number)).decode(), "stream": True, **sampling}
        return (await post(port, "/v2/models/vllm_model/generate_stream", body))[0]

    return one


def load_of_vllm(port: int, max_tokens: int) -> Callable[[int], Any]:
    """Requests over HTTP to vLLM's own server, which detokenizes too."""

    async def one(number: int) -> float:
        body = {"prompt": prompt(number), "max_tokens": max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "model": "verify"}
        return (await post(port, "/v1/completions", body))[0]

    return one


def prompt(number: int) -> list[int]:
    """Another prompt for each request, so that no cache of prefixes answers."""
    return [*b"%06d" % number, *PROMPT[6:]]


@contextmanager
def vllm_serve(directory: Path, python: str, arguments: dict[str, Any]) -> Iterator[int]:
    """vLLM's own server with the same arguments; gives its port."""
    from cog_triton.settings import free_ports

    (port,) = free_ports(1)
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--host=127.0.0.1"]
    command += [f"--port={port}", f"--model={directory}", "--served-model-name=verify"]
    for name, value in arguments.items():
        option = "--" + name.replace("_", "-")
        command += [option] if value is True else [f"{option}={value}"]
    with (directory.parent / "vllm-serve.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not asyncio.run(answers(port)):
            if process.poll() is not None or time.monotonic() > deadline:
                tail = (directory.parent / "vllm-serve.log").read_text()[-3000:]
                raise RuntimeError(f"vllm serve did not start:\n{tail}")
            time.sleep(1)
        yield port
    finally:
        process.terminate()
        process.wait(60)


async def answers(port: int) -> bool:
    """Whether vLLM's server is up."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.0\r\n\r\n")
        status = await reader.readline()
        writer.close()
    except OSError:
        return False
    return b" 200 " in status


@contextmanager
def our_triton(directory: Path, python: str | None) -> Iterator[tuple[int, int]]:
    """The whole stack but for Cog; gives Triton's HTTP and metrics ports."""
    from cog_triton.serving.runtime import Runtime
    from cog_triton.settings import free_ports, load_settings

    work = directory.parent
    engine = {"args": {"engine_python": python or ""}}
    models = {"tensorrt_llm": engine, "vllm_model": {"args": {"REPORT_CUSTOM_METRICS": "yes"}}}
    (work / "serve.yaml").write_text(json.dumps(models))
    http, grpc, metrics = free_ports(3)
    settings = load_settings(
        engine_dir=directory,
        cog_triton_config=work / "serve.yaml",
        cog_triton_work_dir=work / "work",
        triton_http_port=http,
        triton_grpc_port=grpc,
        triton_metrics_port=metrics,
        triton_start_timeout=START_TIMEOUT_S,
    )
    loop = asyncio.new_event_loop()
    runtime = loop.run_until_complete(Runtime.start(settings))
    try:
        yield http, metrics
    finally:
        loop.run_until_complete(runtime.stop())
        loop.close()


def check_triton(http: int, metrics: int, greedy: list[int], check: Checks) -> None:
    """vllm_backend's requests, over HTTP, from the real Triton."""
    import httpx

    url = f"http://127.0.0.1:{http}/v2/models"
    sampling = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}
    text = {"text_input": bytes(PROMPT).decode(), "parameters": {"stream": False, **sampling}}
    body = httpx.post(f"{url}/vllm_model/generate", json=text, timeout=PATIENCE_S).json()
    check("the seed's curl line", body.get("text_output", "").startswith(text["text_input"]), body)
    numeric = {"input_ids": PROMPT, "input_lengths": len(PROMPT), "request_output_len": 32}
    numeric |= {"end_id": -1, "exclude_input_in_output": True}
    body = httpx.post(f"{url}/tensorrt_llm/generate", json=numeric, timeout=PATIENCE_S).json()
    check("the same tokens through Triton", body.get("output_ids") == greedy, body)
    time.sleep(1)
    shown = httpx.get(f"http://127.0.0.1:{metrics}/metrics").text
    check("vLLM's metrics on Triton's port", 'vllm:request_params_n_count{model="' in shown)


def main() -> int:
    """Check and measure; 0 if everything held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-python", help="the Python that has vLLM, if not this one")
    parser.add_argument("--triton", action="store_true", help="start Triton as well")
    parser.add_argument("--no-baseline", action="store_true", help="do not run `vllm serve`")
    parser.add_argument("--argument", action="append", default=[], metavar="NAME=VALUE",
                        help="one more engine argument, as in model.json")  # fmt: skip
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--json", type=Path, help="where to write what was seen")
    options = parser.parse_args()
    arguments: dict[str, Any] = {"load_format": "dummy", "max_model_len": MAX_MODEL_LEN}
    arguments |= {"gpu_memory_utilization": 0.5, "attention_backend": "FLASH_ATTN"}
    arguments |= dict(item.split("=", 1) for item in options.argument)
    check, speeds = Checks(), dict[str, Measured]()

    def load(way: str, one: Callable[[int], Any]) -> None:
        measure(one, options.concurrency, options.concurrency, options.max_tokens)  # warm up
        size = options.requests, options.concurrency, options.max_tokens
        speeds[way] = measure(one, *size)
        print(f"{way:24} {speeds[way]}", flush=True)

    with tempfile.TemporaryDirectory(prefix="verify-vllm-") as made:
        directory = make_engine(Path(made) / "engine", arguments)
        with our_host(directory, options.engine_python) as (link, guest):
            greedy = check_host(link, guest, check)
            load("our host, token ids", load_of_link(link, options.max_tokens))
        if options.triton:
            with our_triton(directory, options.engine_python) as (http, metrics):
                check_triton(http, metrics, greedy, check)
                load("Triton, token ids", load_of_triton(http, options.max_tokens))
                load("Triton, text", load_of_text(http, options.max_tokens))
        if not options.no_baseline:
            python = options.engine_python or sys.executable
            with vllm_serve(directory, python, arguments) as port:
                body = {"prompt": PROMPT, "max_tokens": 32, "temperature": 0, "model": "verify"}
                body |= {"ignore_eos": True, "return_token_ids": True}
                _, raw = asyncio.run(post(port, "/v1/completions", body))
                ids = json.loads(raw[raw.index(b"{") :])["choices"][0]["token_ids"]
                check("the same tokens as vllm serve's", ids == greedy, ids)
                load("vllm serve, text", load_of_vllm(port, options.max_tokens))
    base = speeds.get("vllm serve, text")
    for way, seen in speeds.items():
        ratio = f"  {seen.tokens_per_second / base.tokens_per_second:5.2f} x" if base else ""
        print(f"{way:24} {seen}{ratio}")
    if options.json:
        result = {"checks": check.held, "speeds": {way: asdict(s) for way, s in speeds.items()}}
        options.json.write_text(json.dumps(result, indent=1))
    return 0 if all(check.held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
