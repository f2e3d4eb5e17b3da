"""Inputs of the text models: names, prompts, word lists; made into the engine's, one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton.engines.tensor_contract import ALIASES, flatten_words
from cog_triton.errors import InvalidArgument, PromptRequired
from cog_triton.text.prompt_encoder import PromptEncoder
from cog_triton.text.sampling import SAMPLING
from cog_triton.text.stop_strings import WordLimits
from cog_triton.text.tokenizer import EngineTokenizer

_PASSED_ON = [
    "guided_decoding_guide_type",
    "guided_decoding_guide",
    "num_return_sequences",
    "beam_width",
    "exclude_input_in_output",
    "return_log_probs",
    "return_context_logits",
    "return_generation_logits",
    "return_perf_metrics",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "lora_task_id",
    "lora_weights",
    "lora_config",
]
ENGINE_NAMES = {
    **{item.name: item.tensor for item in SAMPLING if item.tensor},
    **{name: name for name in _PASSED_ON},
    "stream": "streaming",
}
"""Inputs of ensemble and tensorrt_llm_bls that are passed on: the engine's name by ours."""
_ENCODED = [
    "text_input",
    "decoder_text_input",
    "end_id",
    "pad_id",
    "stop_words",
    "bad_words",
    "embedding_bias_words",
    "embedding_bias_weights",
]
KNOWN_INPUTS = [*_ENCODED, "stop", *ENGINE_NAMES, *ALIASES]
"""All inputs of those two, whatever the engine."""
OWN_OUTPUTS = ("text_output", "output_ids", "batch_index", "sequence_index")
"""Outputs of those two that are made here, not by the engine."""

Tensors = dict[str, npt.NDArray[Any]]


def decode_strings(name: str, tensor: npt.NDArray[Any] | None) -> list[list[str]]:
    """Decode a STRING tensor [batch, n], without ``""``; raises E1005 for invalid UTF-8."""
    if tensor is None:
        return []
    try:
        rows = tensor.reshape(len(tensor), -1).tolist()
        return [[item.decode() for item in row if item] for row in rows]
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{name}: not UTF-8: {error.reason} at {error.start}") from error


def embedding_bias(
    tokenizer: EngineTokenizer | None,
    words: npt.NDArray[Any] | None,
    weights: npt.NDArray[Any] | None,
) -> npt.NDArray[np.float32] | None:
    """A bias for each token id as FP32 [1, vocabulary]: for each word, its weight on all its ids.

    None without words; raises E1005 if there are not as many words as weights. Without a tokenizer
    all but empty ones are refused.
    """
    texts = [word for row in decode_strings("embedding_bias_words", words) for word in row]
    values = [] if weights is None else weights.ravel().tolist()
    if not texts and not any(values):
        return None
    if tokenizer is None:
        raise InvalidArgument(
            f"embedding_bias_{'words' if texts else 'weights'}: not supported here; tensorrt_llm"
            " takes an embedding_bias, one weight for each token id"
        )
    if len(texts) != len(values):
        raise InvalidArgument(
            f"embedding_bias_words: {len(texts)} words; embedding_bias_weights has {len(values)}"
        )
    bias = np.zeros((1, tokenizer.tokenizer.get_vocab_size()), dtype=np.float32)
    for text, value in zip(texts, values, strict=True):
        for token in tokenizer.encode(text, add_special_tokens=False):
            bias[0, token] += value
    return bias


def encode_word_lists(
    tokenizer: EngineTokenizer, rows: list[list[str]]
) -> npt.NDArray[np.int32] | None:
    """Encode words, without special tokens, as INT32 [batch, 2, n]; None if there are none."""
    lists = [
        flatten_words(tokenizer.encode(word, add_special_tokens=False) for word in row)
        for row in rows
    ]
    width = max((words.shape[1] for words in lists), default=0)
    if not width:
        return None
    batch = np.full((len(lists), 2, width), -1, dtype=np.int32)
    for row, words in zip(batch, lists, strict=True):
        row[:, : words.shape[1]] = words
    return batch


def encode_prompt(
    encoder: PromptEncoder, name: str, text: str, *, add_special_tokens: bool
) -> list[int]:
    """Encode a prompt as token ids; raises E1001 if there are none, E1002 for too many."""
    ids = encoder.encode(text, add_special_tokens=add_special_tokens)
    if not text or not ids:
        raise PromptRequired(f"{name} is empty")
    return ids


def pad_rows(rows: Sequence[Sequence[int]], pad: int) -> npt.NDArray[np.int32]:
    """Pad rows of token ids to INT32 [batch, longest]."""
    batch = np.full((len(rows), max(map(len, rows))), pad, dtype=np.int32)
    for target, row in zip(batch, rows, strict=True):
        target[: len(row)] = row
    return batch


@dataclass(frozen=True, slots=True)
class InputOptions:
    """How text becomes an engine's inputs; `engine_names` are those that differ from ours.

    `engine_streams` says whether the engine's model is decoupled, `excludes_input` whether its
    answers can be had without the prompt, `takes_bias` whether it has an embedding_bias.
    """

    model: str
    tokenizer: EngineTokenizer
    encoder: PromptEncoder
    word_limits: WordLimits
    add_special_tokens: bool
    engine_names: Mapping[str, str]
    end_id: int | None
    pad_id: int | None
    decoupled: bool
    engine_streams: bool
    excludes_input: bool
    takes_bias: bool


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request: its token ids, and what is asked for.

    `beams` sequences come in one response, `sequences` in responses of their own; `engine` are the
    engine's inputs.
    """

    ids: list[int]
    stop_words: list[str]
    min_tokens: int
    streaming: bool
    echo: bool
    beams: int
    sequences: int
    engine: Tensors = field(repr=False)

    @property
    def engine_streams(self) -> bool:
        """Whether the engine answers token by token; else its answer may begin with the prompt."""
        return bool(self.engine["streaming"].flat[0])

    def without_input(self, ids: list[int]) -> list[int]:
        """The generated ids of an answer of the engine."""
        size = len(self.ids)
        whole = not self.engine_streams and "exclude_input_in_output" not in self.engine
        return ids[size:] if whole and ids[:size] == self.ids else ids


def split(inputs: Mapping[str, npt.NDArray[Any]]) -> list[Tensors]:
    """The requests of one prompt that a batch is made of."""
    size = len(inputs["text_input"])
    return [{name: tensor[row : row + 1] for name, tensor in inputs.items()} for row in range(size)]


def to_prompt(options: InputOptions, inputs: Tensors) -> Prompt:
    """Encode a request of one prompt; raises the coded error of what cannot be done."""
    beams, sequences = (_scalar(inputs, n, 1) for n in ("beam_width", "num_return_sequences"))
    streaming = bool(_scalar(inputs, "stream", 0))
    if streaming and not options.decoupled:
        raise InvalidArgument(
            f"stream=True: {options.model} answers whole here: its decoupled_mode is false"
        )
    engine: Tensors = {
        ENGINE_NAMES[name]: tensor for name, tensor in inputs.items() if name in ENGINE_NAMES
    }
    engine |= {
        theirs: engine.pop(name) for name, theirs in options.engine_names.items() if name in engine
    }
    for name, token in (("end_id", options.end_id), ("pad_id", options.pad_id)):
        if name in inputs:
            engine[name] = inputs[name]
        elif token is not None:
            engine[name] = np.array([[token]], dtype=np.int32)
    ids = _encode(options, inputs, engine, "text_input", "")
    _encode(options, inputs, engine, "decoder_text_input", "decoder_")
    stop_words, bad_words = (_words(options, inputs, n) for n in ("stop_words", "bad_words"))
    # One by one, the engine is stopped here as soon as its text holds a stop word.
    whole = beams > 1 or not options.engine_streams
    for name, words in (("bad_words_list", bad_words), ("stop_words_list", stop_words)):
        tensor = encode_word_lists(options.tokenizer, [words])
        if tensor is not None and (whole or name == "bad_words_list"):
            engine[name] = tensor
    bias = embedding_bias(
        options.tokenizer if options.takes_bias else None,
        inputs.get("embedding_bias_words"),
        inputs.get("embedding_bias_weights"),
    )
    if bias is not None:
        engine["embedding_bias"] = bias
    engine["streaming"] = np.array([[options.engine_streams and (streaming or beams == 1)]])
    engine.pop("exclude_input_in_output", None)
    if options.excludes_input and not engine["streaming"].any():
        engine["exclude_input_in_output"] = np.array([[True]])
    return Prompt(
        ids,
        stop_words,
        _scalar(inputs, "min_tokens", 0),
        streaming,
        not (streaming or _scalar(inputs, "exclude_input_in_output", 0)),
        beams,
        sequences,
        engine,
    )


def rename(inputs: Tensors, aliases: Mapping[str, str]) -> None:
    """Rename inputs that have an older name; raises E1005 where both are given and differ."""
    for alias in aliases.keys() & inputs.keys():
        tensor, name = inputs.pop(alias), aliases[alias]
        if name in inputs and not np.array_equal(inputs[name], tensor):
            raise InvalidArgument(f"{alias} and {name}: two names of one input; set one of them")
        inputs[name] = tensor


def _encode(
    options: InputOptions, inputs: Tensors, engine: Tensors, name: str, prefix: str
) -> list[int]:
    text = "".join(item for row in decode_strings(name, inputs.get(name)) for item in row)
    if prefix and not text:
        return []
    ids = encode_prompt(options.encoder, name, text, add_special_tokens=options.add_special_tokens)
    engine[f"{prefix}input_ids"] = np.array([ids], dtype=np.int32)
    engine[f"{prefix}input_lengths"] = np.array([[len(ids)]], dtype=np.int32)
    return ids


def _words(options: InputOptions, inputs: Tensors, name: str) -> list[str]:
    words = [word for row in decode_strings(name, inputs.get(name)) for word in row]
    options.word_limits.check(name, words)
    return words


def _scalar(inputs: Tensors, name: str, default: int) -> int:
    tensor = inputs.get(name)
    return default if tensor is None else int(tensor.flat[0])
