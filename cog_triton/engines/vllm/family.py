"""vLLM family: detects, reads and renders an engine; does not import vLLM."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cog_triton.artifact import cuda_support
from cog_triton.artifact.lora_adapter import LoRALimits
from cog_triton.engines.base import (
    Abilities,
    EngineFamily,
    EngineLimits,
    ResumeRules,
)
from cog_triton.engines.engine_options import option, read_options
from cog_triton.engines.engine_spec import SPARE_LOADS
from cog_triton.engines.vllm import compiler_caches
from cog_triton.engines.vllm.argument_types import (
    ALLOW_UNTESTED,
    installed_version,
    require_tested,
    types_of,
)
from cog_triton.engines.vllm.image_decoding import images_of
from cog_triton.engines.vllm.model_directory import (
    MODEL_FILE,
    VLLMModel,
    read_arguments,
    read_model,
    weight_bytes,
)
from cog_triton.errors import (
    EngineIncompatible,
    InvalidArgument,
    ModelUnavailable,
)
from cog_triton.sizing import model_files
from cog_triton.sizing.fit import Demand
from cog_triton.system.redaction import HUB_TOKENS
from cog_triton.text import generation_config
from cog_triton.text.sampling import ABILITIES

if TYPE_CHECKING:
    from cog_triton.settings import Settings
import dataclasses

from cog_triton.sizing.memory_sum import AS_STORED, FP8
from cog_triton.sizing.model_files import ModelFiles
from cog_triton.sources.source import Directory

# vllm/config/cache.py; a share of a GPU's memory.
MEMORY_SHARE = 0.92
_UNKNOWN_SIZES = (
    *("cpu_offload_gb", "enable_expert_parallel", "hf_overrides", "kv_transfer_config"),
    *("offload_backend", "offload_group_size", "offload_params", "language_model_only"),
    *("hf_config_path", "quantization_config"),
)


def demand_of(files: ModelFiles, arguments: Mapping[str, Any]) -> Demand:
    """What vLLM asks of its GPUs for a model; raises E1304 for what cannot be summed."""
    given = [name for name in _UNKNOWN_SIZES if arguments.get(name)]
    if 0 in (arguments.get("limit_mm_per_prompt") or {}).values():  # an encoder is not loaded
        given.append("limit_mm_per_prompt")
    if given:
        raise ModelUnavailable(f"{files.name}: {given[0]} is given")
    method = arguments.get("quantization")
    if method not in (None, "fp8", files.shape.quantized):
        raise ModelUnavailable(f"{files.name}: quantization is {method}")
    precision = FP8 if method == "fp8" and files.shape.quantized is None else AS_STORED
    kv = 1 if str(arguments.get("kv_cache_dtype", "")).startswith("fp8") else 2
    title = f"{precision.title.split(' ', 1)[0]} weights" if method else "weights as stored"
    precision = dataclasses.replace(precision, kv=kv, title=f"{title}, {8 * kv}-bit KV cache")
    if files.shape.quantized is None:  # vLLM halves 32 bits, and reads one of several copies
        most = 2 * files.shape.parameters
        files = dataclasses.replace(files, weight_bytes=min(files.weight_bytes, most))
    spread = [arguments.get(f"{kind}_parallel_size") or 1 for kind in ("tensor", "pipeline")]
    absolute = arguments.get("kv_cache_memory_bytes")
    return Demand(
        files=files,
        gpus=int(spread[0]) * int(spread[1]),
        precision=precision,
        share=1.0 if absolute else arguments.get("gpu_memory_utilization") or MEMORY_SHARE,
        utilization=None if absolute else "gpu_memory_utilization in model.json",
    )


_log = logging.getLogger(__name__)

TEXT_MODEL = "vllm_model"
DETERMINISTIC = "deterministic"
"""Option that has vLLM compute a request alike whatever runs beside it (VLLM_BATCH_INVARIANT)."""
REASONING_PARSER = "reasoning_parser"
"""Option that is vLLM's argument: guides begin after the reasoning."""
_MAX_LOGPROBS = 20
PYTHON = "engine_python"
"""Option that is the Python that has vLLM, if that is not Triton's own."""
LEADER = "leader"
"""Option of an engine on several nodes: vLLM's master_addr."""
_SPREADS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
# vllm/config/lora.py of 0.33.
DEFAULT_MAX_LORA_RANK = 16
# A share of a GPU's memory, of which contexts take some, too.
_ROOM = 0.94


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMOptions:
    """Options of the engine's model, beside the arguments of vLLM in model.json."""

    engine_python: str = ""
    cancellation_check_period_ms: int = option(100, least=1)
    allow_untested: bool = False
    deterministic: bool = False
    reasoning_parser: str = ""
    leader: str = ""
    compiler_caches: str = ""
    compiler_cache_bytes: int = 0
    sealed_manifest: str = ""
    seal_required: str = ""


class VLLMFamily(EngineFamily):
    """vLLM family, detected by ``model.json``."""

    name = "vllm"
    engine_class = "cog_triton.engines.vllm.engine_host:VLLMHost"
    replicable = True
    sealable = parses = True
    extra_models = (TEXT_MODEL,)
    resume_rules = ResumeRules(imports="asked", frequency_penalty="logit_bias")
    secrets = HUB_TOKENS  # vLLM downloads weights by itself

    def __init__(self, directory: Path, model: VLLMModel) -> None:
        min_output = 0 if model.embeds else 1
        limits = EngineLimits(
            max_input_len=model.max_model_len - min_output,
            max_seq_len=model.max_model_len,
            max_batch_size=model.max_num_seqs,
            end_id=None,
            pad_id=None,
            min_output=min_output,
        )
        super().__init__(directory, limits, model.tokenizer_dir)
        self.model = model
        self._version: str | None = None

    @property
    def model_dir(self) -> Path:
        """See `EngineFamily.model_dir`; not that of another model's tokenizer."""
        model = Path(str(self.model.arguments["model"]))
        return model if model.is_dir() else self.tokenizer_dir

    def generation_config(self) -> Mapping[str, Any]:
        """See `EngineFamily.generation_config`; model.json may name another, or override it."""
        named = self.model.arguments.get("generation_config") or "auto"
        directory = self.model_dir if named == "auto" else self.directory / named
        found = {} if named == "vllm" else generation_config.load(directory)
        return {**found, **(self.model.arguments.get("override_generation_config") or {})}

    @property
    def nodes(self) -> int:
        """Machines that the engine is spread over."""
        return self.model.nodes

    @property
    def adapters(self) -> Mapping[str, str]:
        """See `EngineFamily.adapters`: those of ``multi_lora.json``."""
        return self.model.loras

    def lora_limits(self) -> LoRALimits:
        """See `EngineFamily.lora_limits`; what model.json says, with vLLM's defaults."""
        arguments = self.model.arguments
        if not arguments.get("enable_lora"):
            raise EngineIncompatible(
                f'{self.directory / MODEL_FILE}: has no "enable_lora": true, so vLLM takes no LoRA'
                " adapters"
            )
        modules = arguments.get("lora_target_modules")
        return LoRALimits(
            max_rank=int(arguments.get("max_lora_rank") or DEFAULT_MAX_LORA_RANK),
            max_loras=int(arguments.get("max_loras") or 1),
            modules=frozenset(modules) if modules else None,
            hidden_size=self.model.hidden_size,
            layers=self.model.layers,
        )

    @property
    def gpus(self) -> int:
        """See `EngineFamily.gpus`; by all the ways that model.json spreads the model in."""
        return math.prod(int(self.model.arguments.get(name) or 1) for name in _SPREADS)

    @property
    def abilities(self) -> Abilities:
        """See `EngineFamily.abilities`; `max_logprobs` bounds what it tells of each token."""
        if self.model.embeds:
            return Abilities(generation=False, embeddings=True)
        most = self.model.arguments.get("max_logprobs", _MAX_LOGPROBS)
        images = images_of(self.model, self._version)
        return Abilities(
            guides={"json_schema", "regex", "grammar"},
            top_log_probs=most if most >= 0 else _MAX_LOGPROBS,
            prompt_log_probs=True,
            sampling=frozenset(ABILITIES),
            structural_tags=True,
            native_tags=True,
            images=images.most,
            image_placeholder=images.placeholder,
            priorities=self.model.arguments.get("scheduling_policy") == "priority",
        )

    def options(self, settings: Settings) -> Mapping[str, object]:
        found: dict[str, object] = {}
        if settings.cog_triton_vllm_untested:
            found[ALLOW_UNTESTED] = "true"
        if settings.lws_leader_address and self.nodes > 1:
            found[LEADER] = settings.lws_leader_address
        if name := settings.vllm_reasoning_parser:
            found[REASONING_PARSER] = name
        if most := settings.compiler_cache_bytes:
            found[compiler_caches.DIRECTORY] = settings.work_dir.resolve() / compiler_caches.FOLDER
            found[compiler_caches.MOST_BYTES] = most
        if python := settings.cog_triton_vllm_python:
            found[PYTHON] = str(python)
        return found

    def check_environment(self, settings: Settings) -> None:
        """See `EngineFamily.check_environment`; an engine of several nodes has no second one."""
        super().check_environment(settings)
        python = settings.cog_triton_vllm_python
        sites = python.parents[1].glob("lib/python3.*/site-packages") if python else sys.path
        cuda_support.require_packages([*map(str, sites)], "vLLM")
        if self.nodes == 1:
            return
        for name, given in {
            "SPARE_ENGINE": settings.spare_engine,
            "ENGINE_REPLICAS": settings.engine_replicas > 1,
        }.items():
            if given:
                text = f"{name}: not with an engine of {self.nodes} nodes ({MODEL_FILE})"
                raise InvalidArgument(text)
        _log.info("the engine is ready once vLLM runs on all %d nodes", self.nodes)

    def memory(self) -> Demand:
        if not weight_bytes(self.model_dir):
            raise ModelUnavailable(f"{self.model.arguments['model']}: no weights are here yet")
        files = model_files.describe(Directory(str(self.model_dir), self.model_dir))
        return demand_of(files, self.model.arguments)

    @classmethod
    def matches(cls, directory: Path) -> bool:
        return (directory / MODEL_FILE).is_file()

    @classmethod
    def open(cls, directory: Path) -> Self:
        """See `EngineFamily.open`; also raises E1201, E1202 and E1304 for what model.json says."""
        return cls(directory, read_model(directory))

    def render(self, config: Any, arguments: Mapping[str, Any]) -> str:
        """See `EngineFamily.render`.

        ``engine_python`` is the Python that has vLLM, if that is not Triton's own; its version
        decides what model.json may hold. Raises E1201 and E1202 by it, and E1305 for a version
        that was never run, unless ``allow_untested``.
        """
        options = asdict(read_options(VLLMOptions, arguments, "a vLLM engine"))
        self._check_version(options)
        if self.nodes == 1:  # others cannot be parked
            options[SPARE_LOADS] = _spare_loads(self.model.arguments)
        return self.render_python(config, self.limits.max_batch_size, options)

    def _check_version(self, options: Mapping[str, Any]) -> None:
        self._version = installed_version(options[PYTHON])
        if self._version is None:  # vLLM's host checks it
            return
        untested = options[ALLOW_UNTESTED]
        if warning := require_tested(self._version, allow_untested=untested):
            _log.warning("%s", warning)
        read_arguments(self.directory, self._version)

    def render_extra_model(self, config: Any) -> None:
        version = types_of(self._version).version
        config.parameters["vllm_version"].string_value = version
        config.parameters["embeds"].string_value = str(self.model.embeds).lower()
        config.parameters["max_input_len"].string_value = str(self.limits.max_input_len)
        config.parameters["tokenizer_dir"].string_value = str(self.tokenizer_dir)


def _spare_loads(arguments: Mapping[str, Any]) -> str:
    """Whether a GPU has room for two engines: vLLM starts where its share of memory is free."""
    share = arguments.get("gpu_memory_utilization", MEMORY_SHARE)
    return "beside" if 2 * share <= _ROOM else "first"
