"""Checks of the real vLLM's classes, as far as they need no GPU; test_vllm_interface.py runs it.

Prints a JSON list of what was tried, what came of it ("" is no error), and how that must begin. If
vLLM finds no platform, its CPU platform stands in; no model is loaded.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")  # without Triton it is V1

import torch
import vllm
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

if not vllm.platforms.current_platform.device_type:  # before others import it by name
    vllm.platforms._current_platform = CpuPlatform()

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.outputs import PoolingOutput, PoolingRequestOutput
from vllm.renderers import renderer_from_config
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import IterationStats, SchedulerStats
from vllm_engines import MAX_MODEL_LEN, hugging_face

from cog_triton.engines.vllm import core_process, engine_api, request_import
from cog_triton.engines.vllm.argument_types import types_of
from cog_triton.engines.vllm.engine_errors import coded_error
from cog_triton.engines.vllm.engine_outputs import EmbeddingConverter
from cog_triton.engines.vllm.sampling_arguments import from_client
from cog_triton.errors import CogTritonError, VLLMUnknownError

ABC = {"type": "token", "prompt_token_ids": [97, 98, 99]}
TEXT = {"prompt": "abc"}
REQUESTS: list[tuple[Any, Mapping[str, Any], str]] = [
    (ABC, {"max_tokens": 5, "detokenize": False}, ""),
    (TEXT, {"n": 2, "bad_words": ["xy"], "structured_outputs": {"json": {"type": "object"}}}, ""),
    (TEXT, {"temperature": -1}, "E1005"),
    (TEXT, {"n": 0}, "E1005"),
    (TEXT, {"structured_outputs": {}}, "E1005"),
    (TEXT, {"structured_outputs": {"regex": "("}}, "E1005"),
    (TEXT, {"logprobs": 1000}, "E1005"),
    (TEXT, {"min_tokens": 30, "max_tokens": 3}, "E1005"),
    (TEXT, {"bad_words": ["w" * 1025]}, "E1005"),
    (TEXT, {"bad_words": ["w"] * 129}, ""),  # 0.33 drops what is there twice
    (TEXT, {"bad_words": [f"w{number}" for number in range(129)]}, "E1005"),
    (TEXT, {"logit_bias": {str(token): 1 for token in range(1025)}}, "E1005"),
    ({"type": "token", "prompt_token_ids": [10**6]}, {}, "E1005"),
    ({"type": "token", "prompt_token_ids": [97] * MAX_MODEL_LEN}, {}, "E1002"),
    ({"type": "token", "prompt_token_ids": [97] * 2 * MAX_MODEL_LEN}, {}, "E1002"),
    ({"prompt": "a" * MAX_MODEL_LEN}, {}, "E1002"),
    ({"prompt": "a" * 2 * MAX_MODEL_LEN}, {}, "E1002"),
    ({"prompt": "a" * 1000 * MAX_MODEL_LEN}, {}, "E1002"),
]
ARGUMENTS: list[tuple[Mapping[str, Any], str]] = [
    ({"gpu_memory_utilization": 1.5}, "E1202"),
    ({"kv_cache_dtype": "fp9"}, "E1202"),
    ({"brand_new": 1}, "E1201"),
]


def main() -> None:
    """Run every check."""
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(list(checks(small_model(Path(directory))))))


def checks(model: Path) -> Iterator[tuple[str, str, str]]:
    """What was tried, what came of it, and how that must begin."""
    arguments = {"model": str(model), "max_model_len": MAX_MODEL_LEN, "dtype": "float16"}
    config = AsyncEngineArgs(**arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)
    renderer = renderer_from_config(config)
    processor = InputProcessor(config, renderer)
    loaded = SimpleNamespace(vllm_config=config, tokenizer=renderer.tokenizer)
    limits = engine_api.worker_limits(loaded)
    yield f"limits of the worker: {limits}", "", ""
    yield f"KV cache's block size and blocks: {engine_api.kv_cache_blocks(loaded)}", "", ""
    types = types_of(vllm.__version__)
    for prompt, values, expected in REQUESTS:
        try:
            params = engine_api.sampling_params(from_client(values, types), stream=True)
            limits.check(params, engine_api.bad_word_tokens(loaded, params))
            processor.process_inputs("a", prompt, params, supported_tasks=("generate",))
            found = ""
        except Exception as error:  # noqa: BLE001 - what is checked
            found = str(coded_error(error))
        yield f"{str(prompt)[:60]} {str(values)[:60]}", found, expected
    for more, expected in ARGUMENTS:
        try:
            engine_api.open_engine({**arguments, **more}, lambda *_: None)
            found = ""
        except CogTritonError as error:
            found = str(error)
        yield str(more), found, expected
    yield "EngineDeadError", str(coded_error(EngineDeadError())), "E2105"
    yield "VLLMValidationError", str(coded_error(VLLMValidationError("no"))), "E1005 InvalidArg"
    yield from overloads()
    yield from nodes(arguments)
    yield from embeddings(processor)
    yield "the hook of the step stream", _hook(), ""
    yield "the start of EngineCore", _core(), ""
    yield "statistics", _statistics(config), ""
    recorded = "hooks" in types.record and len(types.record["hooks"]) > 4
    yield "import of requests", _plugin(), "" if recorded else types.title


def overloads() -> Iterator[tuple[str, str, str]]:
    """The errors of vLLM's own queue limits, since 0.33."""
    from vllm import exceptions

    for name in ("QueueOverflowError", "MaxQueuedTokensError", "RetryableRequestError"):
        if error := getattr(exceptions, name, None):
            yield name, str(coded_error(error())), "E2107"


def nodes(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What vLLM makes of the arguments of the first of two nodes."""
    given = {**arguments, "nnodes": 2, "tensor_parallel_size": 2, "master_addr": "10.0.0.1"}
    own = {"distributed_executor_backend": "mp", **given}
    _, config, _ = engine_api._configured(own, allow_untested=False)
    found = config.parallel_config
    seen = (found.node_rank_within_dp, found.local_world_size, found.master_addr,
            found.distributed_executor_backend)  # fmt: skip
    yield "node 0", "" if seen == (0, 1, "10.0.0.1", "mp") else str(seen), ""


def embeddings(processor: InputProcessor) -> Iterator[tuple[str, str, str]]:
    """Requests for embeddings, and outputs as vLLM's output processor makes them."""
    for prompt, dimensions, tasks, expected in (
        ([97], None, ("embed",), ""),
        ([97] * (MAX_MODEL_LEN + 1), None, ("embed",), "E1002"),
        ([97], 4, ("embed",), "E1005"),  # the model is no Matryoshka's
        ([97], None, ("generate",), "E1005"),
    ):
        try:
            params = engine_api.pooling_params(dimensions)
            asked = {"type": "token", "prompt_token_ids": prompt}
            processor.process_inputs("a", asked, params, supported_tasks=tasks)
            found = ""
        except Exception as error:  # noqa: BLE001 - what is checked
            found = str(coded_error(error))
        yield f"embedding of {len(prompt)}, {dimensions}, {tasks}", found, expected
    for numbers, expected in (([0.5, 0.25], ""), ([], "E2105"), ([float("nan")], "E2200")):
        output = PoolingRequestOutput("a", PoolingOutput(torch.tensor(numbers)), [97], 0, True)
        try:
            event = EmbeddingConverter().convert(output)
            found = "" if list(event.embedding) == numbers else repr(event)
        except CogTritonError as error:
            found = str(error)
        yield f"embedding {numbers}", found, expected


def _hook() -> str:
    engine = AsyncLLM.__new__(AsyncLLM)
    engine.shutdown = lambda *_: None
    engine.output_processor = OutputProcessor(None, log_stats=False)
    try:
        engine_api.StepOutputs(engine, lambda: None)
    except VLLMUnknownError as error:
        return str(error)
    return ""


def _plugin() -> str:
    request_import.make_discoverable()
    request_import.install()
    return str(getattr(EngineCore, request_import.PLUGIN)(None))


def _core() -> str:
    try:
        core_process._seam()
    except (ImportError, AttributeError, ValueError) as error:
        return str(error)
    return ""


def _statistics(config: Any) -> str:
    got: list[tuple[float, ...]] = []
    logger = engine_api._stat_logger(lambda *values: got.append(values))
    manager = StatLoggerManager(config, custom_stat_loggers=[logger], enable_default_loggers=False)
    manager.record(SchedulerStats(), IterationStats(), None, 0)
    return "" if got == [(0.0, 0, 0)] else f"recorded {got}"


def small_model(directory: Path) -> Path:
    """A directory that vLLM takes for a model of one layer."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 2000}
    kind = {"model_type": "llama", "torch_dtype": "float16"}
    hugging_face(directory, architectures=["LlamaForCausalLM"], **kind, **sizes)
    made = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(made))
    return directory


if __name__ == "__main__":
    main()
