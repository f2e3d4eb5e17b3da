"""Tensor contract: inputs and outputs of the Triton model ``tensorrt_llm``.

Names, types and shapes are those of ``triton_model_repo/tensorrt_llm/config.pbtxt``, which
follows TensorRT-LLM 1.2 (triton_backend/all_models/inflight_batcher_llm). This module turns
an `EngineRequest` into request values and back, so both ends agree by construction.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from cog_triton.engines.request import REQUEST, EngineRequest
from cog_triton.errors import InvalidArgument, nearest
from cog_triton.system.log_notes import log_once
from cog_triton.system.printable import printable
from cog_triton.text.guide import Guide, GuideKind
from cog_triton.text.sampling import SAMPLING, SamplingParams
from cog_triton.text.tool_schema import OBJECT

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_log = logging.getLogger(__name__)

_SAMPLING = {item.tensor: item.name for item in SAMPLING if item.tensor}
_SCALARS = tuple(item.name for item in REQUEST if item.tensor == item.name)
# The value that turns an unsupported feature off; it may still be sent.
_NEUTRAL: dict[str, float] = {
    "beam_width": 1,
    "num_return_sequences": 1,
    "beam_search_diversity_rate": 0,
    "early_stopping": 0,
    "runtime_top_p_min": 0,
    "runtime_top_p_decay": 1,
    "return_context_logits": 0,
    "return_generation_logits": 0,
    "return_perf_metrics": 0,
    "skip_cross_attn_blocks": 0,
    "stop": 0,
}
# Parameters of released clients: the request's id over HTTP, and NVIDIA's client with `stop`.
_HABITS = ("id", "Streaming")
ALIASES = {"min_length": "min_tokens", "random_seed": "seed"}
"""Names of inputs before TensorRT-LLM 0.20: ours by theirs."""
FINISH_REASON = "finish_reason"
"""Output of the last response of Python-backend engines; TensorRT-LLM's has none.

Its absence means that Triton lost the end of a stream.
"""
_GUIDE_TYPE, _GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"
LORA_NAME = "lora_name"
"""Input that names a LoRA adapter, of Python-backend engines that have any."""
_GUIDE_TYPES: Mapping[GuideKind, str] = {
    "json_schema": "json_schema",
    "regex": "regex",
    "grammar": "ebnf_grammar",
    "structural_tag": "structural_tag",
    "native_tag": "vllm_structural_tag",
}
_WORDS = {item.tensor: item.name for item in REQUEST if item.tensor.endswith("_words_list")}
SUPPORTED_INPUTS = frozenset(
    {*_SAMPLING, *_SCALARS, *_WORDS, _GUIDE_TYPE, _GUIDE, "input_ids", "input_lengths", LORA_NAME}
)


def encode_request(request: EngineRequest) -> dict[str, Any]:
    """Encode a request as the JSON inputs of Triton's generate endpoints."""
    values: dict[str, Any] = {
        "input_ids": list(request.input_ids),
        "input_lengths": len(request.input_ids),
        "streaming": request.streaming,
    }
    values |= {name: getattr(request.sampling, attr) for name, attr in _SAMPLING.items()}
    for name in _SCALARS:
        value = getattr(request, name)
        if value is not None and value is not False:
            values[name] = value
    for name, attr in _WORDS.items():
        if words := getattr(request, attr):
            values[name] = flatten_words(words).ravel().tolist()
    if request.guide is not None:
        values |= {_GUIDE_TYPE: _GUIDE_TYPES[request.guide.kind], _GUIDE: request.guide.text}
    if request.adapter is not None:
        values[LORA_NAME] = request.adapter
    return values


def decode_request(tensors: Mapping[str, npt.NDArray[Any]]) -> EngineRequest:
    """Decode a request from input tensors; raises E1005 naming what is missing or unsupported."""
    if (size := _batch_size(tensors)) > 1:
        raise InvalidArgument(
            f"a batch of {size} prompts: send a request for each; they run together anyway"
        )
    tensors = {ALIASES.get(name, name): tensor for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if name not in SUPPORTED_INPUTS and not _is_neutral(name, tensor):
            raise InvalidArgument(f"{name}={_show(tensor)}: this engine does not support {name}")
    for name in ("input_ids", "input_lengths", "request_output_len"):
        if name not in tensors:
            raise InvalidArgument(f"{name}: missing; it is required")
    input_ids = tensors["input_ids"].ravel().tolist()
    length = scalar("input_lengths", tensors["input_lengths"])
    if length != len(input_ids):
        raise InvalidArgument(f"input_lengths={length}: input_ids has {len(input_ids)} tokens")
    return EngineRequest(
        input_ids=input_ids,
        sampling=SamplingParams(
            **{
                attr: scalar(name, tensors[name])
                for name, attr in _SAMPLING.items()
                if name in tensors
            }
        ),
        stop_words=_words("stop_words_list", tensors),
        bad_words=_words("bad_words_list", tensors),
        guide=_guide(tensors),
        adapter=_text(LORA_NAME, tensors) if _is_given(LORA_NAME, tensors) else None,
        **{
            "streaming": False,
            **{name: scalar(name, tensors[name]) for name in _SCALARS if name in tensors},
        },
    )


def _batch_size(tensors: Mapping[str, npt.NDArray[Any]]) -> int:
    """Prompts in a request; inputs of several have a dimension for the batch, all the same."""
    lengths = tensors.get("input_lengths")
    return 1 if lengths is None else lengths.size


def check_parameters(parameters: Iterable[str], known: list[str]) -> None:
    """Check request parameters: Triton silently turns inputs that a model lacks into such.

    Near misses of inputs are E1005; what else there is changes nothing, and is logged once a name.
    """
    for name in parameters:
        if name in _HABITS or name.startswith("triton_"):
            continue
        if name == LORA_NAME:
            raise InvalidArgument(f"{LORA_NAME}: this server has no LoRA adapters")
        if hint := nearest(name, known):
            raise InvalidArgument(f"{name}: unknown input{hint}")
        log_once(_log, f"request parameter {printable(name[:80])!r} is unknown, and ignored")


def flatten_words(words: Iterable[Iterable[int]]) -> npt.NDArray[np.int32]:
    """Stop or bad words as INT32 [2, n]: concatenated ids over end offsets, padded with -1."""
    import numpy as np  # late: engine processes start without it

    ids: list[int] = []
    ends: list[int] = []
    for word in words:
        ids.extend(word)
        if len(ids) == (ends[-1] if ends else 0):
            raise InvalidArgument("stop_words or bad_words: a word must not be empty")
        ends.append(len(ids))
    ends.extend([-1] * (len(ids) - len(ends)))
    return np.array([ids, ends], dtype=np.int32)


def unflatten_words(
    tensor: npt.NDArray[Any], name: str = "stop_words_list"
) -> tuple[tuple[int, ...], ...]:
    """The inverse of `flatten_words`, for a tensor with or without its batch dimension."""
    if not tensor.size:
        return ()
    rows = tensor.reshape(-1, tensor.shape[-1])
    if rows.shape[0] != 2:
        raise InvalidArgument(f"{name}: shape {list(tensor.shape)}; must be [2, n]")
    ids, ends = rows.tolist()
    words: list[tuple[int, ...]] = []
    start = 0
    for end in ends:
        if end < 0:
            break
        if not start < end <= len(ids):
            raise InvalidArgument(f"{name}: end offset {end} is not in {start + 1}-{len(ids)}")
        words.append(tuple(ids[start:end]))
        start = end
    return tuple(words)


def _words(name: str, tensors: Mapping[str, npt.NDArray[Any]]) -> tuple[tuple[int, ...], ...]:
    return unflatten_words(tensors[name], name) if name in tensors else ()


def _guide(tensors: Mapping[str, npt.NDArray[Any]]) -> Guide | None:
    """What to match, of those of TensorRT-LLM's kinds of guides that our engines know."""
    if not _is_given(_GUIDE_TYPE, tensors):
        if _is_given(_GUIDE, tensors):
            raise InvalidArgument(f"{_GUIDE}: needs {_GUIDE_TYPE}")
        return None
    kind = _text(_GUIDE_TYPE, tensors)
    if kind == "json":
        return Guide("json_schema", OBJECT)
    for ours, theirs in _GUIDE_TYPES.items():
        if kind == theirs:
            guide = Guide(ours, _text(_GUIDE, tensors))
            guide.check(_GUIDE)
            return guide
    known = ", ".join(_GUIDE_TYPES.values())
    raise InvalidArgument(f"{_GUIDE_TYPE}={kind[:80]!r}: must be json, {known}")


def _is_given(name: str, tensors: Mapping[str, npt.NDArray[Any]]) -> bool:
    return name in tensors and tensors[name].size > 0


def _text(name: str, tensors: Mapping[str, npt.NDArray[Any]]) -> str:
    if not _is_given(name, tensors):
        raise InvalidArgument(f"{name}: missing; it is required")
    value = scalar(name, tensors[name])
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def scalar(name: str, tensor: npt.NDArray[Any]) -> Any:
    """The only value of a tensor; raises E1005 if it has none or several."""
    if tensor.size != 1:
        raise InvalidArgument(f"{name}: shape {list(tensor.shape)}; must hold one value")
    return tensor.item()


def _is_neutral(name: str, tensor: npt.NDArray[Any]) -> bool:
    return tensor.size == 0 or (
        name in _NEUTRAL and tensor.size == 1 and tensor.item() == _NEUTRAL[name]
    )


def _show(tensor: npt.NDArray[Any]) -> str:
    return str(tensor.item()) if tensor.size == 1 else f"<{tensor.size} values>"
