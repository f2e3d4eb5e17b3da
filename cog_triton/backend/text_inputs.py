"""Inputs of the text models: names, prompt encoding, word lists, padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton.engines.tensor_contract import ALIASES, flatten_words
from cog_triton.errors import InvalidArgument, PromptRequired
from cog_triton.text.prompt_encoder import PromptEncoder
from cog_triton.text.sampling import SAMPLING
from cog_triton.text.tokenizer import EngineTokenizer

# Inputs of the ensemble and of tensorrt_llm_bls that are passed on: the engine's name by ours.
ENGINE_NAMES = {
    **{item.name: item.tensor for item in SAMPLING if item.tensor},
    "guided_decoding_guide_type": "guided_decoding_guide_type",
    "guided_decoding_guide": "guided_decoding_guide",
    "num_return_sequences": "num_return_sequences",
    "beam_width": "beam_width",
    "stream": "streaming",
    "exclude_input_in_output": "exclude_input_in_output",
    "return_log_probs": "return_log_probs",
    "return_context_logits": "return_context_logits",
    "return_generation_logits": "return_generation_logits",
    "return_perf_metrics": "return_perf_metrics",
    "return_num_input_tokens": "return_num_input_tokens",
    "return_num_output_tokens": "return_num_output_tokens",
    "lora_task_id": "lora_task_id",
    "lora_weights": "lora_weights",
    "lora_config": "lora_config",
}
# Inputs that are converted before they reach the engine.
TEXT_NAMES = (
    "text_input",
    "decoder_text_input",
    "end_id",
    "pad_id",
    "stop_words",
    "bad_words",
    "embedding_bias_words",
    "embedding_bias_weights",
)
KNOWN_INPUTS = [*TEXT_NAMES, *ENGINE_NAMES, *ALIASES, "stop"]


def decode_strings(name: str, tensor: npt.NDArray[Any] | None) -> list[list[str]]:
    """Decode a STRING tensor [batch, n], without ``""``; raises E1005 for invalid UTF-8."""
    if tensor is None:
        return []
    try:
        rows = tensor.reshape(len(tensor), -1).tolist()
        return [[item.decode() for item in row if item] for row in rows]
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{name}: not UTF-8: {error.reason} at {error.start}") from error


def refuse_bias(*tensors: npt.NDArray[Any] | None) -> None:
    """Refuse embedding_bias_words and embedding_bias_weights, given in this order, unless empty."""
    names = ("embedding_bias_words", "embedding_bias_weights")
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is not None and any(tensor.ravel().tolist()):
            raise InvalidArgument(
                f"{name}: not supported here; tensorrt_llm takes an embedding_bias, one weight"
                " for each token id"
            )


def embedding_bias(
    tokenizer: EngineTokenizer,
    words: npt.NDArray[Any] | None,
    weights: npt.NDArray[Any] | None,
) -> npt.NDArray[np.float32] | None:
    """A bias for each token id as FP32 [1, vocabulary]: for each word, its weight on all its ids.

    None without words; raises E1005 if there are not as many words as weights.
    """
    texts = [] if words is None else [w for row in decode_strings("", words) for w in row]
    values = [] if weights is None else weights.ravel().tolist()
    if not texts and not any(values):
        return None
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
