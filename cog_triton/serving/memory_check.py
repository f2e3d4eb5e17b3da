"""Memory check of a start: weights, KV cache and activations against the GPUs, before loading.

A start is refused where the weights alone are more than an engine may take. The rest is an
estimate, which is told and never refused on; so is what cannot be summed.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cog_triton.artifact.engine_config import CONFIG_NAME
from cog_triton.engines.base import EngineFamily
from cog_triton.engines.openvino.family import OpenVINOFamily
from cog_triton.engines.tensorrt_llm.family import TensorRTLLMFamily
from cog_triton.engines.vllm.family import MEMORY_SHARE, VLLMFamily
from cog_triton.engines.vllm.model_directory import weight_bytes
from cog_triton.errors import BuildConfigInvalid, EngineIncompatible, ModelUnavailable
from cog_triton.settings import Settings
from cog_triton.sizing import fit, gpu_table, model_files
from cog_triton.sizing.memory_sum import AS_STORED, FP8, GIB, Precision, memory_sum
from cog_triton.sizing.model_files import ModelFiles
from cog_triton.system.host_memory import host_memory

_log = logging.getLogger(__name__)

_CERTAIN = 0.95  # of the weights; a model's files may have parts that are not loaded
_UNKNOWN_SIZES = (
    *("cpu_offload_gb", "enable_expert_parallel", "hf_overrides", "kv_transfer_config"),
    *("offload_backend", "offload_group_size", "offload_params", "language_model_only"),
    *("hf_config_path", "quantization_config"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What an engine asks of each of its `gpus`.

    Attributes:
        share: most of a GPU's memory that it takes, by the setting `utilization`, if it has one.
        length: tokens of its longest sequence, by the setting `longest`.
    """

    files: ModelFiles
    gpus: int
    precision: Precision
    share: float
    utilization: str | None
    length: int
    longest: str


def require_memory(
    settings: Settings, family: EngineFamily, *, alone: bool, gpu_device_ids: object = None
) -> None:
    """Check the engine's memory and log what fits.

    Args:
        gpu_device_ids: the serve config's choice of other GPUs than the first, which is not read.
        alone: whether no other engine of this server can hold memory of the GPU, as one does that
            is a spare; else only the GPU's whole memory can refuse.

    Raises:
        EngineIncompatible: its weights alone do not fit; with the numbers and what to set.
    """
    if isinstance(family, OpenVINOFamily):
        compare_host(family.directory)
        return
    if not isinstance(family, VLLMFamily | TensorRTLLMFamily):
        return
    if gpu_device_ids:
        _log.info("memory of the GPU: not compared: gpu_device_ids is given")
        return
    try:
        wanted = of_vllm(family) if isinstance(family, VLLMFamily) else _of_tensorrt_llm(family)
    except (BuildConfigInvalid, ModelUnavailable) as error:
        _log.info("memory of the GPU: not compared: %s", error.detail)
        return
    require(wanted, skip=settings.cog_triton_skip_preflight, alone=alone)


def require(wanted: Demand, *, skip: bool, alone: bool) -> None:
    """Compare `wanted` with the GPUs here; `skip` and raises as `require_memory`."""
    try:
        here = gpu_table.gpus_here()[: wanted.gpus]
        if not here or len({(one.name, one.memory) for one in here}) > 1:
            why = "several kinds" if here else "no GPU"
            _log.info("memory of the GPU: not compared: %s", why)
            return
        gpu = min(here, key=lambda one: one.memory if one.free is None else one.free)
        fits, line = _compare(wanted, gpu, alone=alone)
    except EngineIncompatible as error:
        if not skip:
            raise
        _log.warning("COG_TRITON_SKIP_PREFLIGHT is set, so this is served: %s", error)
        return
    _log.log(logging.INFO if fits else logging.WARNING, "%s", line)


def of_model(files: ModelFiles) -> Demand:
    """Demand of a model that vLLM serves with its defaults, on one GPU."""
    return _vllm_demand(files, {}, min(files.shape.max_len, 1 << 30))


def of_vllm(family: VLLMFamily) -> Demand:
    """Demand of a vLLM directory, by its arguments and the files of its model.

    Raises:
        BuildConfigInvalid, ModelUnavailable: there is nothing that it can be summed of.
    """
    place = family.model_dir
    if not weight_bytes(place):
        model = family.model.arguments["model"]
        raise ModelUnavailable(f"{model}: its weights are not here yet")
    return _vllm_demand(
        model_files.describe(str(place)), family.model.arguments, family.limits.max_seq_len
    )


def _vllm_demand(files: ModelFiles, arguments: Any, length: int) -> Demand:
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
        length=length,
        longest="max_model_len in model.json",
    )


def _of_tensorrt_llm(family: TensorRTLLMFamily) -> Demand:
    limits = family.engine.config.build_config
    if limits.weight_streaming:
        raise ModelUnavailable(f"{family.directory}: its weights are streamed from the host")
    sizes = {path.name: path.stat().st_size for path in family.directory.glob("rank*.engine")}
    text = (family.directory / CONFIG_NAME).read_bytes()
    files, precision = model_files.of_engine(str(family.directory), text, sizes, limits.seq_len)
    return Demand(
        files=files,
        gpus=family.engine.ranks,
        precision=precision,
        share=1.0,
        utilization=None,
        length=limits.seq_len,
        longest="max_seq_len of its build config",
    )


def _compare(wanted: Demand, gpu: gpu_table.Gpu, *, alone: bool) -> tuple[bool, str]:
    """Whether it fits by the estimate, and a line that tells; raises as `require_memory`."""
    files = wanted.files
    one = memory_sum(
        files.shape, files.weight_bytes, gpu, wanted.gpus, wanted.precision, wanted.share
    )
    where = f"{files.name} on {wanted.gpus} x {gpu.name}"
    if one.weights * _CERTAIN > (one.usable if alone else int(gpu.memory * wanted.share)):
        held = gpu.memory - (gpu.memory if gpu.free is None else gpu.free)
        raise EngineIncompatible(
            f"{where}: {one.weights / GIB:.1f} GiB of weights on each, and the engine may take"
            f" {one.usable / GIB:.1f} of its {gpu.memory / GIB:.1f} GiB ({held / GIB:.1f} are held"
            f" by others): {_advice(wanted, one.weights, held, gpu)}"
        )
    if one.kv_tokens < wanted.length:
        return False, (
            f"{where}: memory is short, by an estimate: a sequence of {wanted.length} tokens"
            f" ({wanted.longest}) does not fit the KV cache: {one.kv_tokens} do at most; set less,"
            f" or {wanted.utilization or 'more GPUs'} higher:"
            f" {'; '.join(line.strip() for line in one.lines())}"
        )
    return True, (
        f"{where}: fits by an estimate, {one.kv_cache / GIB:.1f} GiB are left for the KV cache:"
        f" {one.kv_tokens} tokens, {one.kv_tokens // wanted.length} sequences of {wanted.length} at"
        f" once; the largest max_model_len is {min(one.kv_tokens, files.shape.max_len)}"
    )


def _advice(wanted: Demand, weights: int, held: int, gpu: gpu_table.Gpu) -> str:
    """What to set or to end so that `weights` fit."""
    if weights + 0.08 * gpu.memory < gpu.memory - held and wanted.utilization:
        return f"set {wanted.utilization} to {weights / gpu.memory + 0.04:.2f}"
    if weights < gpu.memory * wanted.share:
        return "end what holds the GPU's memory"
    more = "tensor_parallel_size in model.json to more GPUs, or " if wanted.utilization else ""
    return f"set {more}a smaller or quantized model. {fit.would_do(wanted.files)}"


def compare_host(directory: Path) -> None:
    """Log weights against host memory; they are mapped files, so that less of it still serves."""
    size, here = (directory / "openvino_model.bin").stat().st_size, host_memory()
    short = size > here.free
    _log.log(
        logging.WARNING if short else logging.INFO,
        "%s: %.1f GiB of weights, %.1f GiB of memory are free (%s)%s",
        *(directory, size / GIB, here.free / GIB, here.limits),
        ": it will be slow, or end; serve a smaller model" if short else "",
    )
