"""Optional dependencies of vLLM: which arguments need a package that its Python may not have.

vLLM finds out when it uses them, after the weights are loaded, or takes something else in silence.
An image of ours leaves some of them out (nix/vllm-image.json), and others come with no vLLM.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from cog_triton.errors import InvalidPredictorConfig

_FLASHINFER_SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"


class Need(NamedTuple):
    """An optional dependency: what asks for it, and what to ask for instead."""

    arguments: tuple[str, ...]
    """Names in model.json, with a dot before an object's key; in capitals, of the environment."""
    values: tuple[str, ...]
    """Patterns of the values, in lower case."""
    modules: tuple[str, ...]
    """Python modules of which one is needed."""
    why: str
    """Why they are not everywhere."""
    instead: str


_ATTENTION = ("attention_backend", "attention_config.backend", "mm_encoder_attn_backend")
_MOE = ("moe_backend", "kernel_config.moe_backend", "speculative_config.moe_backend")
_LINEAR = ("linear_backend", "kernel_config.linear_backend")
_CONNECTOR = ("kv_transfer_config.kv_connector",)
_COMPILES = "it compiles its kernels where they are used, with nvcc, 100 MB"
_SEPARATE = "it does not come with vLLM"
_AUTO = 'leave it out or use "auto"'

NEEDS = (
    Need(
        (*_ATTENTION, *_MOE, *_LINEAR, "all2all_backend", "sparse_indexer_topk_backend"),
        ("*flashinfer*",),
        ("flashinfer",),
        _COMPILES,
        'leave it out: vLLM takes "FLASH_ATTN", "CUTLASS" or "TRITON" kernels',
    ),
    Need((_FLASHINFER_SAMPLER,), ("1",), ("flashinfer",), _COMPILES, "leave it out"),
    Need(
        (*_MOE, *_LINEAR),
        ("deep_gemm*",),
        ("deep_gemm", "vllm.third_party.deep_gemm"),
        _COMPILES,
        _AUTO,
    ),
    Need((*_ATTENTION, *_MOE, *_LINEAR), ("b12x",), ("b12x",), _SEPARATE, _AUTO),
    Need((*_ATTENTION, *_MOE), ("hpc", "hpc_attn"), ("hpc",), _SEPARATE, _AUTO),
    Need(
        _ATTENTION,
        ("tokenspeed_mla",),
        ("tokenspeed_mla",),
        "80 MB for one attention backend of one model",
        'use "CUTLASS_MLA"',
    ),
    Need(
        ("speculative_config.method", "spec_method"),
        ("ngram",),
        ("numba",),
        "51 MB that nothing else uses",
        'use "ngram_gpu"',
    ),
    Need(
        ("speculative_config.method", "spec_method"),
        ("suffix",),
        ("arctic_inference",),
        _SEPARATE,
        'use "ngram_gpu"',
    ),
    Need(
        ("quantization",),
        ("bitsandbytes",),
        ("bitsandbytes",),
        _SEPARATE,
        "use another quantization",
    ),
    Need(("quantization",), ("torchao",), ("torchao",), _SEPARATE, "use another quantization"),
    Need(("quantization", "load_format"), ("gguf",), ("gguf",), _SEPARATE, "use safetensors"),
    Need(("load_format",), ("tensorizer",), ("tensorizer",), _SEPARATE, _AUTO),
    Need(("load_format",), ("runai_streamer*",), ("runai_model_streamer",), _SEPARATE, _AUTO),
    Need(("load_format",), ("modelexpress",), ("modelexpress",), _SEPARATE, _AUTO),
    Need(("load_format",), ("fastsafetensors",), ("fastsafetensors",), _SEPARATE, _AUTO),
    Need(("load_format",), ("instanttensor",), ("instanttensor",), _SEPARATE, _AUTO),
    Need(_LINEAR, ("fbgemm",), ("fbgemm_gpu",), _SEPARATE, _AUTO),
    Need(_LINEAR, ("conch",), ("conch",), _SEPARATE, _AUTO),
    Need(("all2all_backend",), ("deepep_*",), ("deep_ep",), _SEPARATE, "leave it out"),
    Need(("all2all_backend",), ("nixl_ep",), ("nixl_ep",), _SEPARATE, "leave it out"),
    Need(("all2all_backend",), ("mori_*",), ("mori",), _SEPARATE, "leave it out"),
    Need(("all2all_backend",), ("moonep",), ("moonep",), _SEPARATE, "leave it out"),
    Need(_CONNECTOR, ("lmcache*",), ("lmcache",), _SEPARATE, 'use "OffloadingConnector"'),
    Need(_CONNECTOR, ("nixl*",), ("nixl",), _SEPARATE, "leave it out"),
    Need(_CONNECTOR, ("mooncake*",), ("mooncake",), _SEPARATE, "leave it out"),
    Need(_CONNECTOR, ("moriio*",), ("mori",), _SEPARATE, "leave it out"),
    Need(_CONNECTOR, ("flexkv*",), ("flexkv",), _SEPARATE, 'use "OffloadingConnector"'),
    Need(_CONNECTOR, ("hf3fs*",), ("hf3fs_fuse",), _SEPARATE, 'use "OffloadingConnector"'),
    Need(("distributed_executor_backend",), ("ray",), ("ray",), _SEPARATE, 'use "mp"'),
    Need(
        ("limit_mm_per_prompt.video",),
        ("[1-9]*",),
        ("cv2",),
        "51 MB for video alone, and it needs numpy 2",
        "use images",
    ),
    Need(("limit_mm_per_prompt.audio",), ("[1-9]*",), ("soundfile",), _SEPARATE, "leave it out"),
)


def refuse_missing(arguments: Mapping[str, Any]) -> None:
    """Refuse what this Python lacks a package for, before any weights are loaded; raises E1202.

    Without FlashInfer, vLLM is told to sample without it: it would fail to import it.
    """
    if not _found("flashinfer"):
        os.environ.setdefault(_FLASHINFER_SAMPLER, "0")
    for need in NEEDS:
        for argument in need.arguments:
            value = _value(arguments, argument)
            if not any(fnmatchcase(str(value).lower(), pattern) for pattern in need.values):
                continue
            if any(map(_found, need.modules)):
                continue
            place = "the environment" if argument.isupper() else "model.json"
            package = need.modules[0]
            raise InvalidPredictorConfig(
                f"{place}: {argument}={value!r}: vLLM's Python has no {package} ({need.why});"
                f" {need.instead}, or name as engine_python a Python that has vLLM and {package}"
            )


def _value(arguments: Mapping[str, Any], argument: str) -> Any:
    """The value of an argument, None where it is not given."""
    if argument.isupper():
        return os.environ.get(argument)
    name, _, key = argument.partition(".")
    value = arguments.get(name)
    if not key:
        return value
    return value.get(key) if isinstance(value, Mapping) else None


def _found(module: str) -> bool:
    """Whether a module can be found; packages above it are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a package above is missing, or has no spec
        return False
