"""Inputs of the models that stream text, made into the engine's: one prompt at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton.backend.text_inputs import (
    ENGINE_NAMES,
    decode_strings,
    embedding_bias,
    encode_prompt,
    encode_word_lists,
    refuse_bias,
)
from cog_triton.errors import InvalidArgument
from cog_triton.text.prompt_encoder import PromptEncoder
from cog_triton.text.stop_strings import WordLimits
from cog_triton.text.tokenizer import EngineTokenizer

Tensors = dict[str, npt.NDArray[Any]]


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
    engine |= _bias(options, inputs)
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


def is_stop(inputs: Mapping[str, npt.NDArray[Any]]) -> bool:
    """Whether a request stops another one."""
    return "stop" in inputs and bool(inputs["stop"].any())


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


def _bias(options: InputOptions, inputs: Tensors) -> Tensors:
    words, weights = (inputs.get(f"embedding_bias_{name}") for name in ("words", "weights"))
    if not options.takes_bias:
        refuse_bias(words, weights)
        return {}
    bias = embedding_bias(options.tokenizer, words, weights)
    return {} if bias is None else {"embedding_bias": bias}


def _words(options: InputOptions, inputs: Tensors, name: str) -> list[str]:
    words = [word for row in decode_strings(name, inputs.get(name)) for word in row]
    options.word_limits.check(name, words)
    return words


def _scalar(inputs: Tensors, name: str, default: int) -> int:
    tensor = inputs.get(name)
    return default if tensor is None else int(tensor.flat[0])


def requested(names: Collection[str]) -> list[str]:
    """The engine's outputs among those that a client asked for."""
    return [name for name in names if name not in OWN_OUTPUTS]


OWN_OUTPUTS = ("text_output", "output_ids", "batch_index", "sequence_index")
"""Outputs that are made here, not by the engine."""
