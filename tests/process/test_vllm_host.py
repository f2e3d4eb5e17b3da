"""vLLM host: a process over the double of vLLM, serving token and text requests to two clients."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from image_files import FORMATS, bomb, image, told
from lora_adapters import adapter
from process_trees import until
from vllm_engines import DOUBLES, EOS, MAX_MODEL_LEN, VISION, calls, hugging_face, vllm_engine
from vllm_hosts import (
    ABC,
    HANDLES,
    PATIENCE_S,
    Inbox,
    Running,
    ask,
    failure,
    over_double,
    running,
    text,
    token_ids,
    tokens,
)

from cog_triton.engines.adapter_registry import REGISTRY, AdapterRegistry, RegisteredAdapter
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.request import EngineRequest, TokenEvent
from cog_triton.engines.vllm import core_process
from cog_triton.engines.vllm.core_process import CoreProcess
from cog_triton.engines.vllm.engine_outputs import TextOutputConverter, TokenOutputConverter
from cog_triton.engines.vllm.image_decoding import decode_images
from cog_triton.errors import (
    CogTritonError,
    EngineIncompatible,
    InvalidArgument,
    InvalidPredictorConfig,
    Overloaded,
    PromptTooLong,
    TritonUnavailable,
    VLLMUnknownError,
)
from cog_triton.pictures.image_limits import ImagePart
from cog_triton.system.process_state import process_state
from cog_triton.text.sampling import SamplingParams

PROMPT_IDS = [*b"a\x01b"]
BAD = InvalidArgument


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One host for all tests that do not end it."""
    with over_double(tmp_path_factory.mktemp("host")) as started:
        yield started


def embedded(ids: list[int], **values: Any) -> EngineRequest:
    """A request for an embedding."""
    sampling = SamplingParams(max_tokens=1)
    return EngineRequest(input_ids=ids, sampling=sampling, embeds=True, **values)


def parts(*files: bytes) -> tuple[ImagePart, ...]:
    return tuple(ImagePart(f"part {number}", data) for number, data in enumerate(files))


def test_tokens_stream_as_they_are_generated(host: Running) -> None:
    counts = []
    for _ in range(10):  # a reader that is late has its tokens merged
        events = ask(host.engine, tokens(ABC))
        assert (token_ids(events), events[-1].finish) == (list(b"abcab"), "length")
        counts.append(len(events))
    assert max(counts) > 2


@pytest.mark.parametrize("streaming", [True, False])
def test_the_end_token_and_stop_words_end_the_output_and_are_cut(
    host: Running, streaming: bool
) -> None:
    def ends(request: EngineRequest) -> tuple[list[int], str | None]:
        events = ask(host.engine, request)
        return token_ids(events), events[-1].finish

    request = tokens([97, 98, EOS, 99], 50, streaming=streaming)
    assert ends(request) == (list(b"ab"), "stop")
    assert ends(replace(request, end_id=98)) == (list(b"a"), "stop")
    assert len(ends(replace(request, end_id=-1))[0]) == 50
    aborted = len(calls(host.journal, "abort"))
    stops = tokens(ABC, 100, streaming=streaming, stop_words=((99, 97, 98), (1, 2)))
    assert ends(stops) == (list(b"ab"), "stop")
    if streaming:
        host.calls("abort", aborted + 1)


def test_log_probs_are_those_of_the_chosen_tokens(host: Running) -> None:
    events = ask(host.engine, tokens(ABC, 3, return_log_probs=True))
    assert [p for event in events for p in event.log_probs] == [-0.125, -0.25, -0.375]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": None}),
        ({"top_k": 40, "seed": 7}, {"temperature": 1.0, "top_p": 1.0, "top_k": 40, "seed": 7}),
        ({"top_k": 1, "temperature": 0.7}, {"temperature": 0.0}),
        ({"top_p": 0.5, "seed": 2**64 - 1}, {"seed": 2**63 - 1}),
        ({"top_p": 0.5, "min_tokens": 2}, {"min_tokens": 2, "max_tokens": 5}),
    ],
)
def test_sampling_values_reach_vllm(
    host: Running, sampling: dict[str, Any], expected: dict[str, Any]
) -> None:
    ask(host.engine, tokens(ABC, **sampling))
    params = host.calls("add_request")[-1]["params"]
    assert {name: params[name] for name in expected} == expected
    assert params["detokenize"] is False


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (tokens([1] * MAX_MODEL_LEN, 1), PromptTooLong, "Prompt length"),
        (tokens(ABC, MAX_MODEL_LEN), PromptTooLong, "request_output_len"),
        (tokens([]), BAD, "input_ids"),
        (tokens(ABC, temperature=3.0, top_p=0.5), BAD, "temperature"),
        (text("x" * MAX_MODEL_LEN), PromptTooLong, ""),
        (text("a", {"n": 2, "temperature": 0}), BAD, "n must be 1"),
        (text("a", {"structured_outputs": {}}), BAD, "structured"),
        (text("a", {"lora_name": "x"}), BAD, "LoRA"),
        (text("break the request"), VLLMUnknownError, "RuntimeError: CUDA error: it broke"),
        (tokens(ABC, bad_words=((1,),) * 129), BAD, "bad_words: 129"),
        (tokens(ABC, bad_words=((1,) * 1025,)), BAD, "bad_words: 1025"),
        (tokens(ABC, bad_words=((1, 257),)), BAD, "bad_words: holds token 257"),
        (text("a", {"bad_words": ["b" * 1025]}), BAD, "bad_words: 1025"),
        (text("a", {"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}), BAD, "logit_bias"),
        (text("a", {"allowed_token_ids": [1] * 1025}), BAD, "allowed_token_ids"),
        (text("a", {"min_tokens": 1, "stop_token_ids": list(range(128))}), BAD, "stop_token_ids"),
        (tokens(PROMPT_IDS, images=parts(image())), BAD, ""),
        (embedded(ABC), BAD, "pooling"),
    ],
)
def test_unservable_requests_get_a_coded_error(
    host: Running, request_: Any, error: type[CogTritonError], words: str
) -> None:
    raised = failure(host.engine, request_)
    assert type(raised) is error
    assert words in raised.detail
    assert token_ids(ask(host.engine, tokens(ABC, 1))) == [97], "the engine serves on"


def test_priorities_reach_vllm(host: Running) -> None:
    for client in (host.guest(), host.engine):
        ask(client, replace(tokens(ABC), priority=-3))
        assert host.calls("add_request")[-1]["priority"] == -3


@pytest.mark.usefixtures("vllm_environment")
def test_stats_have_the_kv_cache_and_its_prefix_hits(tmp_path: Path) -> None:
    with running(tmp_path, max_model_len=100_000) as host:
        until_stats(host, KVCacheStats(0, 16, 1024, 0, 0))
        for _ in range(2):
            ask(host.engine, tokens(list(b"the same 16 bytes, and some more"), 4))
        until_stats(host, KVCacheStats(0, 16, 1024, 64, 32))
        inbox = Inbox()
        host.engine.submit(handle := next(HANDLES), tokens(ABC, 90_000), inbox)
        until_stats(host, KVCacheStats(1 / 1024, 16, 1024, 67, 32))
        host.engine.cancel(handle)
        until_stats(host, KVCacheStats(0, 16, 1024, 67, 32))


def until_stats(host: Running, wanted: KVCacheStats) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (found := host.engine.stats().kv_cache) != wanted:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


@pytest.mark.usefixtures("vllm_environment")
def test_options_and_paths_of_the_engine_reach_vllm(tmp_path: Path) -> None:
    """vLLM's hash of compiled code has the text of the model's path in it."""
    for name in ("engine/weights", "elsewhere"):
        hugging_face(tmp_path / name)
    arguments = {"model": "weights", "tokenizer": "../elsewhere", "reasoning_parser": "own"}
    options = {"deterministic": "true", "reasoning_parser": "qwen3"}
    with running(tmp_path, options, disable_log_stats=True, **arguments) as host:
        (call,) = host.calls("open")
        assert token_ids(ask(host.engine, tokens(ABC))) == list(b"abcab")
        assert host.engine.stats().kv_cache is None
    opened = (call["model"], call["tokenizer"])
    assert opened == ("./weights", str(tmp_path / "elsewhere"))
    assert '"reasoning_parser": "qwen3"' in json.dumps(call)
    assert calls(tmp_path / "journal", "batch_invariant")


@pytest.mark.usefixtures("vllm_environment")
def test_vllms_own_queue_limit_is_overload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DOUBLE_DELAY", "30")
    with running(tmp_path, max_model_len=4096, max_num_queued_reqs=1) as host:
        host.engine.submit(next(HANDLES), tokens(ABC, 4000), Inbox())
        host.calls("add_request")
        for request in (tokens(ABC), text("abc")):
            assert isinstance(failure(host.engine, request), Overloaded)


@pytest.mark.parametrize(
    ("version", "arguments", "error", "words"),
    [
        ("", {"gpu_memory_utilization": 1.5}, InvalidPredictorConfig, "gpu_memory_utilization"),
        ("0.40.0", {}, EngineIncompatible, "COG_TRITON_VLLM_UNTESTED"),
        ("", {"config": {"architectures": ["BertModel"]}}, InvalidPredictorConfig, "pooling"),
        ("", {"convert": "classify"}, InvalidPredictorConfig, "classify"),
        (
            "",
            {
                "config": {"architectures": ["LlamaForCausalLM"]},
                "limit_mm_per_prompt": {"image": 1},
            },
            InvalidPredictorConfig,
            "LlamaForCausalLM",
        ),
    ],
)
@pytest.mark.usefixtures("vllm_environment")
def test_an_engine_that_does_not_load_raises_its_error(
    version: str,
    arguments: dict[str, Any],
    error: type[CogTritonError],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if version:
        monkeypatch.setenv("VLLM_DOUBLE_VERSION", version)
    with pytest.raises(error) as raised:
        Running(vllm_engine(tmp_path / "engine", **arguments))
    assert words in raised.value.detail


@pytest.mark.usefixtures("vllm_environment")
def test_adapters_come_and_go_while_the_host_runs(tmp_path: Path) -> None:
    registry = AdapterRegistry(tmp_path / "registry.json")
    registry.write(())
    with running(tmp_path, {REGISTRY: str(registry.path)}, enable_lora=True) as host:
        assert "is not supported" in failure(host.engine, tokens(ABC, adapter="doll")).detail
        registry.write([RegisteredAdapter("doll", 1, adapter(tmp_path / "doll"), 4, "doll")])
        for _ in range(3):
            ask(host.engine, tokens(ABC, adapter="doll"))
        assert len(host.calls("add_lora")) == 1, "it is loaded once"
        registry.write([RegisteredAdapter("odd", 7, adapter(tmp_path / "odd", 13), 13, "odd#7")])
        found = failure(host.engine, tokens(ABC, adapter="odd"))
        assert isinstance(found, EngineIncompatible)
        assert "LoRA rank 13 is odd" in found.detail
        assert "is not supported" in failure(host.engine, tokens(ABC, adapter="doll")).detail
        ask(host.engine, tokens(ABC))


@pytest.mark.usefixtures("vllm_environment")
def test_engine_death_fails_every_request_and_ends_the_host(tmp_path: Path) -> None:
    with running(tmp_path, max_model_len=4096) as host:
        guest = host.guest()
        inboxes = [Inbox() for _ in range(6)]
        for inbox in inboxes[:3]:
            host.engine.submit(next(HANDLES), tokens(ABC, 4000), inbox)
        for inbox in inboxes[3:]:
            guest.submit(next(HANDLES), text("abc", {"max_tokens": 4000}, stream=True), inbox)
        inboxes[-1].next()
        host.engine.submit(next(HANDLES), text("kill the engine"), Inbox())
        for inbox in inboxes:
            assert isinstance(inbox.until_end()[-1].error, TritonUnavailable)
        assert host.engine._process.wait(PATIENCE_S) != 0
        assert isinstance(failure(host.engine, tokens(ABC)), TritonUnavailable)


def test_two_engines_share_requests_and_their_cache_use_is_the_mean(tmp_path: Path) -> None:
    values = {"max_model_len": 10_000, "max_num_seqs": 3, "data_parallel_size": 2}
    with over_double(tmp_path, delay="0.05", **values) as host:
        assert host.engine.stats().max_batch_size == 6
        inboxes = [Inbox() for _ in range(6)]
        for number, inbox in enumerate(inboxes):
            host.engine.submit(next(HANDLES), tokens([97 + number], 9), inbox)
        found = [token_ids(inbox.until_end()) for inbox in inboxes]
        assert found == [[97 + number] * 9 for number in range(6)]
        handles = [next(HANDLES) for _ in range(4)]
        for handle in handles:
            host.engine.submit(handle, tokens(ABC, 9000), Inbox())
        until(lambda: (host.engine.stats().kv_cache or KVCacheStats(0)).usage, "use of the cache")
        assert host.engine.stats().kv_cache.usage < 0.5


def test_what_the_other_engine_aborts_is_an_error() -> None:
    completion = SimpleNamespace(index=0, token_ids=[], finish_reason="abort", logprobs=None)
    output = SimpleNamespace(outputs=[completion], finished=True, prompt_token_ids=[97])
    for converter in (TokenOutputConverter(tokens(ABC)), TextOutputConverter(text("abc"))):
        event = converter.convert(output)
        assert event is not None
        assert event.error is not None
        assert event.error.code == "E2105"


@pytest.fixture(scope="module")
def pooling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A host with a model that makes embeddings."""
    values = {"runner": "pooling", "config": {"is_matryoshka": True, "hidden_size": 8}}
    with over_double(tmp_path_factory.mktemp("pooling"), **values) as started:
        yield started


def embedding(*numbers: float, size: int = 8) -> list[float]:
    """What the double makes of a prompt: these numbers, of length 1 together."""
    made = np.zeros(size, np.float32)
    made[: len(numbers)] = numbers
    return (made / np.linalg.norm(made)).tolist()  # type: ignore[no-any-return]


def test_an_embedding_comes_alone_with_the_end(pooling: Running) -> None:
    (event,) = ask(pooling.engine, embedded(ABC))
    assert event == TokenEvent([], [], "stop", embedding=embedding(3, *ABC))
    (event,) = ask(pooling.engine, embedded(ABC, dimensions=2))
    assert event.embedding == embedding(3, 97, size=2)


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (embedded([1] * (MAX_MODEL_LEN + 1)), PromptTooLong, ""),
        (embedded(ABC, dimensions=9), BAD, "dimensions"),
        (embedded([255]), VLLMUnknownError, "not finite"),
        (embedded(list(b"break the request")), VLLMUnknownError, "CUDA error"),
        (tokens(ABC), BAD, "generation"),
        (text("abc"), BAD, "generation"),
        (embedded(ABC, adapter="x"), BAD, "LoRA"),
    ],
)
def test_what_cannot_be_embedded_gets_a_coded_error(
    pooling: Running, request_: Any, error: type[CogTritonError], words: str
) -> None:
    raised = failure(pooling.engine, request_)
    assert type(raised) is error
    assert words in raised.detail
    assert ask(pooling.engine, embedded(ABC))[0].finish == "stop", "the engine serves on"


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A host with a model that takes two images."""
    values = {"config": VISION, "limit_mm_per_prompt": {"image": 2}}
    with over_double(tmp_path_factory.mktemp("vision"), **values) as started:
        yield started


def test_images_take_the_places_of_their_placeholders(vision: Running) -> None:
    one, other = image(size=(9, 8)), image(size=(7, 6))
    request = text("\x01,\x01", {"max_tokens": 40}, images=parts(one, other), stream=True)
    events = ask(vision.engine, request)
    said = "".join(event.texts[0] for event in events)
    assert said.startswith(f"{told(one)}\x01,{told(other)}\x01")
    assert events[-1].input_token_count == len(told(one) + told(other)) + 3


def test_an_answer_has_the_room_that_images_leave(vision: Running) -> None:
    data = image(size=(28 * 20, 28))
    asked = MAX_MODEL_LEN - len(PROMPT_IDS)
    answer = ask(vision.engine, tokens(PROMPT_IDS, asked, images=parts(data)))
    expanded = 2 + len(told(data)) + 20
    assert len(token_ids(answer)) == MAX_MODEL_LEN - expanded
    assert answer[-1].finish == "length"


@pytest.mark.parametrize("kind", ["token ids", "text"])
def test_refusals_of_images_name_the_part(vision: Running, kind: str) -> None:
    def refused(*files: bytes, prompt: bytes = b"\x01") -> Exception:
        images = parts(*files)
        if kind == "text":
            return failure(vision.engine, text(prompt.decode(), images=images))
        return failure(vision.engine, tokens([*prompt], images=images))

    for name in FORMATS:
        whole = image(name, (200, 200), 0x123456)
        error = refused(whole[: len(whole) * 2 // 3])
        assert isinstance(error, InvalidArgument), name
        assert "part 0: a broken image" in str(error)
    assert "part 1: a broken image" in str(refused(image(), b"GIF89a nothing of it"))
    assert "part 0: a broken image" in str(refused(bomb(64, 64)))
    assert isinstance(refused(image(size=(2800, 2800))), PromptTooLong)
    assert "At most 2 image(s)" in str(refused(*[image()] * 3, prompt=b"\x01\x01\x01"))
    assert "placeholder" in str(refused(image(), image()))
    assert "part 0: not fit for this model" in str(refused(image(size=(4000, 10))))
    ask(vision.engine, tokens(PROMPT_IDS, images=parts(image())))  # the engine serves on


def test_a_file_that_is_larger_than_its_header_says_is_refused() -> None:
    """As a GIF may be, whose frames have sizes of their own."""
    data = bytearray(image("GIF", (300, 300)))
    data[6:10] = b"\x10\0\x10\0"
    loaded: list[bytes] = []
    with pytest.raises(InvalidArgument, match="header says 16x16"):
        decode_images(parts(bytes(data)), loaded.append)
    assert loaded == []


@pytest.fixture
def core() -> Iterator[CoreProcess]:
    made = CoreProcess(["LlamaForCausalLM"], ranks=1)
    yield made
    made._end()


def started(core: CoreProcess, target: Callable[..., Any], *args: Any) -> Any:
    process = core_process._Offering(core).Process(target=target, args=args, name="EngineCore")
    process.start()
    return process


def is_core(pid: int) -> bool:
    program = "cog_triton.engines.vllm.core_process"
    return program in Path(f"/proc/{pid}/cmdline").read_text()


@pytest.mark.parametrize("victim", ["host", "core"])
def test_enginecore_is_the_process_that_was_begun_first_and_ends_with_its_host(
    victim: str, tmp_path: Path
) -> None:
    with over_double(tmp_path) as host:
        (call,) = host.calls("engine_core")
        core = call["pid"]
        assert is_core(core)
        environment = call["environment"]
        assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
        assert environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0", "which the host has set since"
        assert token_ids(ask(host.engine, tokens(ABC, 2))) == [97, 98]
        os.kill(core if victim == "core" else host.pid, signal.SIGKILL)
        assert host.engine._process.wait(60) != 0
        until(lambda: process_state(core) in ("", "Z"), "EngineCore's process ends")


def test_a_users_own_way_of_starting_enginecore_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    with over_double(tmp_path) as host:
        (call,) = host.calls("engine_core")
        below = Path(f"/proc/{host.pid}/task/{host.pid}/children").read_text().split()
        assert not any(map(is_core, {call["pid"], *map(int, below)})), "and none is left"


def test_enginecore_is_spawned_by_vllm_if_its_process_has_died(
    core: CoreProcess, caplog: pytest.LogCaptureFixture
) -> None:
    os.kill(core.pid, signal.SIGKILL)
    os.waitid(os.P_PID, core.pid, os.WEXITED | os.WNOWAIT)
    process = started(core, os._exit, 7)
    process.join(60)
    assert process.exitcode == 7
    assert process.pid != core.pid
    assert "has died" in caplog.text


@pytest.mark.usefixtures("vllm_environment")
def test_a_vllm_that_starts_enginecore_in_another_way_is_left_alone(
    core: CoreProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(str(DOUBLES))
    from vllm.v1.engine import utils  # type: ignore[import-not-found, unused-ignore]

    assert core_process._seam() is utils
    monkeypatch.setattr(utils, "get_mp_context", theirs := lambda method: method)
    with caplog.at_level(logging.WARNING), core.offered():
        assert utils.get_mp_context is theirs
    assert "get_mp_context takes ['method']" in caplog.text
    assert not Path(f"/proc/{core.pid}").exists()
