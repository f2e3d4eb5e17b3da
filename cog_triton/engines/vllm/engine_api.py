"""vLLM API: every call into vLLM, by its recorded interface.

What else imports it is its plugin, `request_import`, and `core_process`. Imports are late, as
serving processes and Triton's stubs run without vLLM.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import CodeType
from typing import Any

from cog_triton.engines.vllm import request_import
from cog_triton.engines.vllm.argument_types import require_tested
from cog_triton.engines.vllm.core_process import CoreProcess
from cog_triton.engines.vllm.engine_errors import is_refusal
from cog_triton.engines.vllm.model_directory import refuse_unknown
from cog_triton.engines.vllm.sampling_arguments import WorkerLimits
from cog_triton.errors import (
    CogTritonError,
    EngineIncompatible,
    InvalidPredictorConfig,
    VLLMUnknownError,
)

_log = logging.getLogger(__name__)

# A fork would inherit our connections, and the death of the host would go unnoticed.
_ENVIRONMENT = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1"}

RecordMetrics = Callable[[float, int, int], None]
"""Takes the used share of the KV cache, and tokens that a step looked up and found there."""
Put = Callable[[Any], None]


def open_engine(
    arguments: Mapping[str, Any],
    record: RecordMetrics,
    *,
    allow_untested: bool = False,
    core: CoreProcess | None = None,
) -> Any:
    """Load AsyncLLM; `record` gets its KV cache's statistics unless ``disable_log_stats``.

    `core` becomes its EngineCore, or the first of several.

    Raises E1305 for a version that was never run, unless `allow_untested`, E1201 for arguments
    that this vLLM does not have, E1202 for values it refuses.
    """
    engine_args, config, context = _configured(arguments, allow_untested=allow_untested)
    from vllm.v1.engine.async_llm import AsyncLLM

    _log.info("vLLM is configured, and starts EngineCore")
    with core.offered() if core is not None else nullcontext():
        return AsyncLLM.from_vllm_config(
            vllm_config=config,
            usage_context=context,
            stat_loggers=None if engine_args.disable_log_stats else [_stat_logger(record)],
            enable_log_requests=engine_args.enable_log_requests,
            aggregate_engine_logging=engine_args.aggregate_engine_logging,
            disable_log_stats=engine_args.disable_log_stats,
        )


def _configured(arguments: Mapping[str, Any], *, allow_untested: bool) -> tuple[Any, Any, Any]:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if importlib.util.find_spec("flashinfer") is None:  # as images are, and vLLM would import it
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    import vllm

    if warning := require_tested(vllm.__version__, allow_untested=allow_untested):
        _log.warning("%s", warning)
    request_import.make_discoverable()
    import vllm.v1.engine.async_llm  # before the arguments, which load plugins
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    _log.info("vLLM %s is imported", vllm.__version__)
    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    refuse_unknown(arguments, known, vllm.__version__)
    context = UsageContext.OPENAI_API_SERVER  # whose defaults are those of a server
    try:
        engine_args = AsyncEngineArgs(**arguments)
        config = engine_args.create_engine_config(usage_context=context)
    except CogTritonError:
        raise
    except Exception as error:
        if not is_refusal(error):
            raise
        raise InvalidPredictorConfig(f"model.json: vLLM refuses it: {error}") from error
    return engine_args, config, context


class StepOutputs:
    """Step outputs: what vLLM's output handler makes, with no task or queue of a request between.

    Of what vLLM does not publish, it uses that the handler calls ``put`` of a request's
    RequestOutputCollector for each output, and ``update_scheduler_stats`` of the OutputProcessor
    once at the end of each engine step, into however many chunks it divides that.
    """

    def __init__(self, engine: Any, on_step_end: Callable[[], None]) -> None:
        """`on_step_end` is called in the event loop; raises E2200 if this vLLM does otherwise."""
        try:
            missing = next(_missing(engine), None)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            missing = f"{type(error).__name__}: {error}"
        if missing is not None:
            raise VLLMUnknownError(
                "this vLLM does not hand over its outputs by engine steps, so requests are"
                f" iterated one by one, which costs more: {missing}"
            )
        self._engine = engine
        processor = engine.output_processor
        update = processor.update_scheduler_stats

        def end_step(scheduler_stats: Any) -> None:
            try:
                on_step_end()
            except Exception:  # noqa: BLE001 - vLLM would end every request
                _log.exception("an engine step could not be sent")
            update(scheduler_stats)

        processor.update_scheduler_stats = end_step

    async def add_request(
        self,
        name: str,
        prompt: Any,
        params: Any,
        put: Put,
        lora: Any = None,
        priority: int = 0,
    ) -> bool:
        """Start a request; returns whether vLLM had made outputs before this returned.

        `put` gets each RequestOutput, or the exception that ends the request, and must not raise.
        It is called before the end of the step that made the output, or at any time for an
        exception, for an aborted request, and for those outputs that were made before.
        """
        collector = await self._engine.add_request(
            name, prompt, params, lora_request=lora, priority=priority
        )
        try:
            early = collector.get_nowait()
        except Exception as error:  # noqa: BLE001 - what `put` is for
            early = error
        collector.put = put
        if early is not None:
            put(early)
        return early is not None


def _missing(engine: Any) -> Iterator[str]:
    """What `StepOutputs` needs and this vLLM lacks."""
    from vllm.v1.engine.output_processor import RequestOutputCollector

    _, *names = inspect.signature(type(engine).add_request).parameters.values()
    required = [parameter.name for parameter in names if parameter.default is parameter.empty]
    if required != ["request_id", "prompt", "params"]:
        yield f"AsyncLLM.add_request takes {required}"
    processor = type(engine.output_processor)
    used = [
        (type(engine)._run_output_handler, {"process_outputs", "update_scheduler_stats"}),
        *((getattr(processor, name), {"put"}) for name in ("process_outputs", "propagate_error")),
    ]
    for function, wanted in used:
        if unused := wanted - set(_names(inspect.unwrap(function).__code__)):
            yield f"{function.__qualname__} does not call {', '.join(sorted(unused))}"
    for function, parameters in (
        (processor.update_scheduler_stats, ["self", "scheduler_stats"]),
        (RequestOutputCollector.put, ["self", "output"]),
        (RequestOutputCollector.get_nowait, ["self"]),
    ):
        if (found := list(inspect.signature(function).parameters)) != parameters:
            yield f"{function.__qualname__} takes {found}"
    if not RequestOutputCollector.__dictoffset__:
        yield "RequestOutputCollector.put cannot be replaced"


def _names(code: CodeType) -> Iterator[str]:
    """Names that a function uses, those of the functions inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def sampling_params(
    values: Mapping[str, Any], *, stream: bool, bad_words: Sequence[Sequence[int]] = ()
) -> Any:
    """SamplingParams of a request, for deltas with `stream`, else for one output at the end.

    What vLLM raises where it refuses a value is known to `engine_errors.is_refusal`.
    """
    from vllm.sampling_params import (
        RepetitionDetectionParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )

    made = dict(values)
    if made.get("structured_outputs") is not None:
        made["structured_outputs"] = StructuredOutputsParams(**made["structured_outputs"])
    if made.get("repetition_detection") is not None:
        made["repetition_detection"] = RepetitionDetectionParams(**made["repetition_detection"])
    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    params = SamplingParams(**made, output_kind=kind)
    if bad_words:  # vLLM derives these from text words, and keeps them if there are none
        params._bad_words_token_ids = [list(word) for word in bad_words]
    return params


def pooling_params(dimensions: int | None) -> Any:
    """PoolingParams of an embedding, of the model's own size or of `dimensions` numbers.

    vLLM itself refuses `dimensions` that the model cannot be cut to.
    """
    from vllm.pooling_params import PoolingParams

    return PoolingParams(task="embed", dimensions=dimensions)


def embedding(output: Any) -> list[float]:
    """The numbers of a PoolingRequestOutput; raises vLLM's own error of a request that failed."""
    from vllm.outputs import EmbeddingRequestOutput

    failed = getattr(output, "error", None)  # since 0.33
    if failed is not None:
        raise failed.to_exception()
    numbers: list[float] = EmbeddingRequestOutput.from_base(output).outputs.embedding
    return numbers


async def check_tasks(engine: Any, *, embeds: bool) -> None:
    """Raise E1202 if the loaded engine makes no embeddings with `embeds`, or them alone without."""
    tasks = await engine.get_supported_tasks()
    if embeds and "embed" not in tasks:
        raise InvalidPredictorConfig(
            "model.json: runner: vLLM makes no embeddings with this model; what it can do is"
            f" {', '.join(tasks)}"
        )
    if not embeds and "embed" in tasks and "generate" not in tasks:
        raise InvalidPredictorConfig(
            'model.json: runner: this model makes embeddings, no text; set it to "pooling"'
        )


def lora_request(name: str, number: int, path: str) -> Any:
    """The LoRARequest of one adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=path)


async def add_lora(engine: Any, lora: Any) -> None:
    """Load an adapter; raises E1305 with what vLLM says.

    In a request, an adapter that cannot be loaded would end the engine, with all that it runs.
    """
    try:
        await engine.add_lora(lora)
    except Exception as error:
        if engine.errored:
            raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise EngineIncompatible(
            f"lora_name={lora.lora_name!r}: vLLM does not load the adapter: {reason[-1][:400]}"
        ) from error


async def render_images(engine: Any, prompt: Mapping[str, Any], images: Sequence[Any]) -> Any:
    """The prompt for `AsyncLLM.add_request`, with the tokens of its images in it.

    `images` are from `image_loader`. Past the cache that vLLM shares with EngineCore: an image of a
    request that is refused or cancelled after this would be taken for known there.
    """
    raw = {**prompt, "multi_modal_data": {"image": list(images)}}
    (rendered,) = await engine.renderer.render_cmpl_async([raw], skip_mm_cache=True)
    return rendered


def image_loader() -> Callable[[bytes], Any]:
    """What decodes an image's file, as vLLM's own server does."""
    from vllm.multimodal.media import ImageMediaIO

    load: Callable[[bytes], Any] = ImageMediaIO().load_bytes
    return load


def image_limit(engine: Any) -> int:
    """How many images of a prompt the loaded engine takes."""
    processor = getattr(engine.renderer, "mm_processor", None)
    return processor.info.allowed_mm_limits.get("image", 0) if processor is not None else 0


def worker_limits(engine: Any) -> WorkerLimits:
    """Limits of the loaded engine's worker."""
    from vllm import envs

    vocab_size = int(engine.vllm_config.model_config.get_vocab_size())
    if not getattr(engine.vllm_config, "use_v2_model_runner", True):
        return WorkerLimits(vocab_size)
    # vllm/v1/worker/gpu/sample/bad_words.py and logit_bias.py; variables since 0.33.
    return WorkerLimits(
        vocab_size,
        bad_words=getattr(envs, "VLLM_MAX_NUM_BAD_WORDS", 128),
        bad_word_tokens=getattr(envs, "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS", 1024),
        allowed_token_ids=1024,
        logit_bias=1024,
        stop_token_ids=128,
    )


def bad_word_tokens(engine: Any, params: Any) -> Sequence[Sequence[int]]:
    """Token ids of a request's bad words, which vLLM derives from their text."""
    if params.bad_words and engine.tokenizer is not None:
        params.update_from_tokenizer(engine.tokenizer)
    return params._bad_words_token_ids or ()


def max_num_seqs(engine: Any) -> int:
    """Batch size limit of the loaded engine, in requests; of all engines with data parallelism."""
    config = engine.vllm_config
    return int(config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size)


def kv_cache_blocks(engine: Any) -> tuple[int | None, int | None]:
    """Size in tokens and number of the loaded engine's KV cache blocks, as vLLM's server has them.

    Either is None where vLLM leaves it to EngineCore.
    """
    cache = engine.vllm_config.cache_config
    return cache.block_size or None, cache.num_gpu_blocks or None


def _stat_logger(record: RecordMetrics) -> Any:
    from vllm.v1.metrics.loggers import StatLoggerBase

    latest: dict[int, float] = {}  # usage by engine: with data parallelism there are several

    class StatLogger(StatLoggerBase):  # type: ignore[misc, unused-ignore]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            if scheduler_stats is not None:
                latest[engine_idx] = scheduler_stats.kv_cache_usage
                prefix = scheduler_stats.prefix_cache_stats
                record(sum(latest.values()) / len(latest), prefix.queries, prefix.hits)

        def log_engine_initialized(self) -> None:
            pass

    return StatLogger
