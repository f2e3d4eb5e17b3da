"""First build config of a model: YAML with the reason of every choice beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from cog_triton.builder.arguments import ArgumentValue
from cog_triton.errors import EngineIncompatible, UnknownExample, nearest
from cog_triton.sizing.fit import Fit
from cog_triton.sizing.memory_sum import FP8, INT4_AWQ, INT8, MAX_NUM_TOKENS
from cog_triton.sizing.model_files import ModelFiles

_FP8_ATTENTION_SM = 90
_WHY = {
    "fp8": "half the memory of 16 bits, at a small loss",
    "int8": "half the memory of 16 bits; needs no calibration",
    "int4_awq": "a quarter of 16 bits, at a loss that is to be seen",
}
_Args = Mapping[str, tuple[ArgumentValue, str]]


@dataclass(frozen=True, slots=True)
class _Family:
    """Example family `name`; `names` are the script's own names of the usual arguments."""

    name: str
    extra: Mapping[str, ArgumentValue] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    weight_only: bool = True
    splits_experts: bool = False


_GEMMA = _Family(
    "gemma",
    {"ckpt-type": "hf"},
    {"model_dir": "model-dir", "output_dir": "output-model-dir", "tp_size": "world-size"},
    weight_only=False,
)
_LLAMA = _Family("llama", splits_experts=True)
_QWEN = _Family("qwen", splits_experts=True)
_FAMILIES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "MixtralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _QWEN,
    "Qwen2MoeForCausalLM": _QWEN,
    "Qwen3ForCausalLM": _QWEN,
    "Qwen3MoeForCausalLM": _QWEN,
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "PhiForCausalLM": _Family("phi"),
    "Phi3ForCausalLM": _Family("phi"),
    "GPT2LMHeadModel": _Family("gpt", {"gpt_variant": "gpt2"}),
    "GPTBigCodeForCausalLM": _Family("gpt", {"gpt_variant": "starcoder"}),
    "Starcoder2ForCausalLM": _Family("gpt", {"gpt_variant": "starcoder2"}),
    "InternLM2ForCausalLM": _Family("internlm2"),
    "BloomForCausalLM": _Family("bloom"),
    "FalconForCausalLM": _Family("falcon"),
    "GPTJForCausalLM": _Family("gptj"),
    "GPTNeoXForCausalLM": _Family("gptneox"),
    "MptForCausalLM": _Family("mpt"),
    "OPTForCausalLM": _Family("opt"),
}


def _family_of(architecture: str, where: str) -> _Family:
    """Family whose scripts convert `architecture`; `where` names the model in errors.

    Raises:
        UnknownExample: none does.
    """
    if architecture in _FAMILIES:
        return _FAMILIES[architecture]
    raise UnknownExample(
        f"{where}: architecture {architecture or 'not named'!r}: this command knows the scripts of"
        f" {', '.join(_FAMILIES)}{nearest(architecture, list(_FAMILIES))}; --for vllm serves many"
        " more"
    )


def build_config(files: ModelFiles, fit: Fit, file_name: str) -> str:
    """YAML of a build config that makes the engine that `fit` describes.

    Raises:
        UnknownExample: no TensorRT-LLM script converts the architecture.
        EngineIncompatible: its weights are quantized already, by a method that the scripts do not
            read.
    """
    family = _family_of(files.shape.architecture, files.name)
    if files.shape.quantized is not None:
        raise EngineIncompatible(
            f"{files.name}: weights are quantized already ({files.shape.quantized}), and the"
            " scripts want 16-bit ones: name the model that it was made from, or use --for vllm"
        )
    return "\n".join(
        [
            *_head(files, fit, family, file_name),
            *_first(fit, family, files.shape.dtype),
            *_build(fit),
            "",
        ]
    )


def _head(files: ModelFiles, fit: Fit, family: _Family, file_name: str) -> Iterator[str]:
    memory = fit.memory
    yield f"# {files.name} on {memory.gpus} x {memory.gpu.name} (sm_{memory.gpu.sm}):"
    yield f"# {memory.precision.title}. Written by cog-triton init."
    yield "#"
    yield "# Memory of each GPU, estimated:"
    for line in memory.lines():
        yield f"#   {line}"
    yield "#"
    yield f"# Check it:  cog-triton build --check {file_name}"
    yield f"# Build it:  cog-triton build {file_name} -o engine.tar"
    if memory.precision in (FP8, INT4_AWQ):
        yield "# quantize.py calibrates on a data set, which it downloads, and needs a GPU with"
        yield "# room for the whole model in 16 bits."
    yield ""
    yield f"model_id: {files.name}"
    if files.commit is not None:
        yield f"revision: {files.commit} # of the day on which this was written"
    yield f"example_name: {family.name} # {files.shape.architecture}"
    if memory.gpus > 1:
        yield f"world_size: {memory.gpus}"
    yield ""


def _first(fit: Fit, family: _Family, dtype: str) -> Iterator[str]:
    precision, gpus = fit.memory.precision, fit.memory.gpus
    splits = "tensor parallelism: each GPU has a part of every layer" if gpus > 1 else ""
    if precision in (FP8, INT4_AWQ):
        kv = {"kv_cache_dtype": ("fp8", "half the memory of 16 bits a token")}
        blocks = {"awq_block_size": (128, "weights that share a scale")}
        yield from _step(
            "quantize",
            "script: quantize.py # of examples/quantization",
            {
                "model_dir": ("model", ""),
                "output_dir": ("quantized", ""),
                "dtype": ("auto", "of what is not quantized: as it is stored"),
                "qformat": (precision.label, _WHY[precision.label]),
                **(kv if precision is FP8 else blocks),
                "calib_size": (512, "texts to calibrate on"),
                "tp_size": (gpus, splits),
            },
        )
        return
    names = family.names
    args: dict[str, tuple[ArgumentValue, str]] = {
        **{name: (value, "") for name, value in family.extra.items()},
        names.get("model_dir", "model_dir"): ("model", ""),
        names.get("output_dir", "output_dir"): ("checkpoint", ""),
        "dtype": ("float16" if dtype == "float16" else "bfloat16", "as the weights are stored"),
        names.get("tp_size", "tp_size"): (gpus, splits),
    }
    if precision is INT8 and family.weight_only:
        args["use_weight_only"] = (True, _WHY[precision.label])
        args["weight_only_precision"] = ("int8", "")
    if family.splits_experts and fit.memory.gpus > 1:
        args["workers"] = (gpus, "ranks converted at once")
    yield from _step("convert", "script: convert_checkpoint.py", args)


def _build(fit: Fit) -> Iterator[str]:
    memory = fit.memory
    eight_bits = memory.precision is FP8
    source = "quantized" if memory.precision in (FP8, INT4_AWQ) else "checkpoint"
    args: dict[str, tuple[ArgumentValue, str]] = {
        "checkpoint_dir": (source, ""),
        "output_dir": ("engine", ""),
        "max_batch_size": (fit.max_batch_size, "sequences that run at once; others wait"),
        "max_input_len": (fit.max_input_len, "tokens of a prompt"),
        "max_seq_len": (fit.max_seq_len, "prompt and answer; the KV cache holds two of them"),
        "max_num_tokens": (MAX_NUM_TOKENS, "of a step; longer prompts are prefilled in chunks"),
        "gemm_plugin": (
            "disable" if eight_bits else "auto",
            "TensorRT's own FP8 matrix products are faster" if eight_bits else "",
        ),
        "multiple_profiles": ("enable", "more to build, and much faster to serve"),
        "use_paged_context_fmha": ("enable", "for KV-cache reuse and chunked context"),
    }
    if eight_bits and memory.gpu.sm >= _FP8_ATTENTION_SM:
        args["use_fp8_context_fmha"] = ("enable", "attention of prompts in FP8, too")
    if memory.gpus > 1:
        args["reduce_fusion"] = ("enable", "the sum over GPUs and the norm after it in one kernel")
        args["workers"] = (memory.gpus, "ranks built at once")
    yield ""
    yield from _step("build", "executable: trtllm-build", args)


def _step(name: str, runs: str, args: _Args) -> Iterator[str]:
    output = next(value for key, (value, _) in args.items() if key.startswith("output"))
    yield f"{name}:"
    yield f"  {runs}"
    yield f"  output_dir: {output}"
    yield "  args:"
    for key, (value, why) in args.items():
        text = "" if value is True else f" {value}"
        yield f"    {key}:{text}" + (f" # {why}" if why else "")
