"""First configs of a model: YAML with the reason of every choice, and arguments of vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from cog_triton.errors import EngineIncompatible, UnknownExample, nearest
from cog_triton.sizing.fit import Fit
from cog_triton.sizing.memory_sum import FP8, INT4_AWQ, INT8, MAX_NUM_TOKENS
from cog_triton.sizing.model_files import ModelFiles

Arguments = Mapping[str, tuple[object, str]]
"""Values by name, each with its reason, which may be empty."""
_FP8_ATTENTION_SM = 90
_OF_THE_DAY = "of the day on which this was written"
_TOKENS = "prompt and answer; the KV cache holds two of them"
_SEQUENCES = "sequences that run at once; others wait"
_WHY = {
    "fp8": "half the memory of 16 bits, at a small loss",
    "int8": "half the memory of 16 bits; needs no calibration",
    "int4_awq": "a quarter of 16 bits, at a loss that is to be seen",
}
# Example families whose scripts convert an architecture.
_FAMILIES = {
    **dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"), "llama"),
    **dict.fromkeys(("Qwen2ForCausalLM", "Qwen2MoeForCausalLM"), "qwen"),
    **dict.fromkeys(("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"), "qwen"),
    **dict.fromkeys(("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"), "gemma"),
    **dict.fromkeys(("PhiForCausalLM", "Phi3ForCausalLM"), "phi"),
    **dict.fromkeys(("GPT2LMHeadModel", "GPTBigCodeForCausalLM", "Starcoder2ForCausalLM"), "gpt"),
    "InternLM2ForCausalLM": "internlm2",
    "BloomForCausalLM": "bloom",
    "FalconForCausalLM": "falcon",
    "GPTJForCausalLM": "gptj",
    "GPTNeoXForCausalLM": "gptneox",
    "MptForCausalLM": "mpt",
    "OPTForCausalLM": "opt",
}
_GPT_VARIANTS = {
    "GPT2LMHeadModel": "gpt2",
    "GPTBigCodeForCausalLM": "starcoder",
    "Starcoder2ForCausalLM": "starcoder2",
}
# How gemma's script calls the usual arguments.
_GEMMA = {"model_dir": "model-dir", "output_dir": "output-model-dir", "tp_size": "world-size"}
_SPLIT_EXPERTS = ("llama", "qwen")


def vllm_arguments(files: ModelFiles, fit: Fit) -> Arguments:
    """Engine arguments of vLLM.

    Raises:
        EngineIncompatible: vLLM does not quantize 16-bit weights so.
    """
    memory = fit.memory
    if memory.precision in (INT8, INT4_AWQ):
        raise EngineIncompatible(
            f"{files.name}: {memory.precision.title}: vLLM does not make them of 16-bit weights:"
            " name a model whose weights are quantized so already"
        )
    found: dict[str, tuple[object, str]] = {"model": (files.name, "directory or hub id")}
    if files.commit is not None:
        found["revision"] = (files.commit, _OF_THE_DAY)
    if memory.gpus > 1:
        found["tensor_parallel_size"] = (memory.gpus, "each GPU has a part of every layer")
    if memory.precision is FP8:
        found["quantization"] = ("fp8", "half the memory of 16 bits; made while loading")
        found["kv_cache_dtype"] = ("fp8", "half the memory of 16 bits a token")
    found["max_model_len"] = (fit.max_seq_len, _TOKENS)
    found["max_num_seqs"] = (fit.max_batch_size, _SEQUENCES)
    return found


def sealed_config(arguments: Arguments) -> str:
    """YAML of a build config that seals an engine of these arguments of vLLM."""
    named = {"model": "model_id", "revision": "revision"}
    lines = {name: f"{json.dumps(value)} # {why}" for name, (value, why) in arguments.items()}
    top = [f"{key}: {lines.pop(name)}" for name, key in named.items() if name in lines]
    args = [f"  {name}: {line}" for name, line in lines.items()]
    return "\n".join(["engine: vllm", *top, "args:", *args]) + "\n"


def build_config(files: ModelFiles, fit: Fit, file_name: str) -> str:
    """YAML of a build config that makes the engine that `fit` describes.

    Raises:
        UnknownExample: no TensorRT-LLM script converts the architecture.
        EngineIncompatible: its weights are quantized already, by a method that the scripts do not
            read.
    """
    architecture = files.shape.architecture
    if architecture not in _FAMILIES:
        raise UnknownExample(
            f"{files.name}: architecture {architecture or 'not named'!r}: this command knows the"
            f" scripts of {', '.join(_FAMILIES)}{nearest(architecture, list(_FAMILIES))}; --for"
            " vllm serves many more"
        )
    if files.shape.quantized is not None:
        raise EngineIncompatible(
            f"{files.name}: weights are quantized already ({files.shape.quantized}), and the"
            " scripts want 16-bit ones: name the model that it was made from, or use --for vllm"
        )
    quantized = fit.memory.precision in (FP8, INT4_AWQ)
    if quantized:
        first = _step("quantize", "script: quantize.py # of examples/quantization", _quantize(fit))
    else:
        first = _step("convert", "script: convert_checkpoint.py", _convert(files, fit))
    build = _step("build", "executable: trtllm-build", _build(fit, quantized))
    return "\n".join([*_head(files, fit, file_name), *first, "", *build, ""])


def _head(files: ModelFiles, fit: Fit, file_name: str) -> Iterator[str]:
    memory, architecture = fit.memory, files.shape.architecture
    yield f"# {files.name} on {memory.gpus} x {memory.gpu.name} (sm_{memory.gpu.sm}):"
    yield f"# {memory.precision.title}. Written by cog-triton init."
    yield "#"
    yield "# Memory of each GPU, estimated:"
    yield from (f"#   {line}" for line in memory.lines())
    yield "#"
    yield f"# Check it:  cog-triton build --check {file_name}"
    yield f"# Build it:  cog-triton build {file_name} -o engine.tar"
    if memory.precision in (FP8, INT4_AWQ):
        yield "# quantize.py calibrates on a data set, which it downloads, and needs a GPU with"
        yield "# room for the whole model in 16 bits."
    yield ""
    yield f"model_id: {files.name}"
    if files.commit is not None:
        yield f"revision: {files.commit} # {_OF_THE_DAY}"
    yield f"example_name: {_FAMILIES[architecture]} # {architecture}"
    if memory.gpus > 1:
        yield f"world_size: {memory.gpus}"
    yield ""


def _ranks(fit: Fit) -> tuple[int, str]:
    gpus = fit.memory.gpus
    return gpus, "tensor parallelism: each GPU has a part of every layer" if gpus > 1 else ""


def _quantize(fit: Fit) -> Arguments:
    precision = fit.memory.precision
    kv = {"kv_cache_dtype": ("fp8", "half the memory of 16 bits a token")}
    blocks = {"awq_block_size": (128, "weights that share a scale")}
    return {
        "model_dir": ("model", ""),
        "output_dir": ("quantized", ""),
        "dtype": ("auto", "of what is not quantized: as it is stored"),
        "qformat": (precision.label, _WHY[precision.label]),
        **(kv if precision is FP8 else blocks),
        "calib_size": (512, "texts to calibrate on"),
        "tp_size": _ranks(fit),
    }


def _convert(files: ModelFiles, fit: Fit) -> Arguments:
    architecture, gpus = files.shape.architecture, fit.memory.gpus
    family = _FAMILIES[architecture]
    names = _GEMMA if family == "gemma" else {name: name for name in _GEMMA}
    args: dict[str, tuple[object, str]] = {}
    if family == "gemma":
        args["ckpt-type"] = ("hf", "")
    if family == "gpt":
        args["gpt_variant"] = (_GPT_VARIANTS[architecture], "")
    args[names["model_dir"]] = ("model", "")
    args[names["output_dir"]] = ("checkpoint", "")
    dtype = "float16" if files.shape.dtype == "float16" else "bfloat16"
    args["dtype"] = (dtype, "as the weights are stored")
    args[names["tp_size"]] = _ranks(fit)
    if fit.memory.precision is INT8 and family != "gemma":
        args["use_weight_only"] = (True, _WHY["int8"])
        args["weight_only_precision"] = ("int8", "")
    if family in _SPLIT_EXPERTS and gpus > 1:
        args["workers"] = (gpus, "ranks converted at once")
    return args


def _build(fit: Fit, quantized: bool) -> Arguments:
    memory = fit.memory
    fp8 = memory.precision is FP8
    faster = "TensorRT's own FP8 matrix products are faster"
    args: dict[str, tuple[object, str]] = {
        "checkpoint_dir": ("quantized" if quantized else "checkpoint", ""),
        "output_dir": ("engine", ""),
        "max_batch_size": (fit.max_batch_size, _SEQUENCES),
        "max_input_len": (fit.max_input_len, "tokens of a prompt"),
        "max_seq_len": (fit.max_seq_len, _TOKENS),
        "max_num_tokens": (MAX_NUM_TOKENS, "of a step; longer prompts are prefilled in chunks"),
        "gemm_plugin": ("disable", faster) if fp8 else ("auto", ""),
        "multiple_profiles": ("enable", "more to build, and much faster to serve"),
        "use_paged_context_fmha": ("enable", "for KV-cache reuse and chunked context"),
    }
    if fp8 and memory.gpu.sm >= _FP8_ATTENTION_SM:
        args["use_fp8_context_fmha"] = ("enable", "attention of prompts in FP8, too")
    if memory.gpus > 1:
        args["reduce_fusion"] = ("enable", "the sum over GPUs and the norm after it in one kernel")
        args["workers"] = (memory.gpus, "ranks built at once")
    return args


def _step(name: str, runs: str, args: Arguments) -> Iterator[str]:
    output = next(value for key, (value, _) in args.items() if key.startswith("output"))
    yield from (f"{name}:", f"  {runs}", f"  output_dir: {output}", "  args:")
    for key, (value, why) in args.items():
        text = "" if value is True else f" {value}"
        yield f"    {key}:{text}" + (f" # {why}" if why else "")
