"""Triton models ``preprocessing`` and ``postprocessing``: text to token ids, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cog_triton.backend import python_backend, triton_log
from cog_triton.backend.text_inputs import (
    KNOWN_INPUTS,
    Tensors,
    decode_strings,
    embedding_bias,
    encode_prompt,
    encode_word_lists,
    pad_rows,
)
from cog_triton.engines.tensor_contract import check_parameters
from cog_triton.errors import CogTritonError
from cog_triton.text.prompt_encoder import PromptEncoder

_PROMPTS = (
    ("QUERY", "text_input", "INPUT_ID", "REQUEST_INPUT_LEN"),
    ("DECODER_QUERY", "decoder_text_input", "DECODER_INPUT_ID", "REQUEST_DECODER_INPUT_LEN"),
)
_WORDS = (
    ("BAD_WORDS_DICT", "bad_words", "BAD_WORDS_IDS"),
    ("STOP_WORDS_DICT", "stop_words", "STOP_WORDS_IDS"),
)


class Preprocessing:
    """Encodes prompts and word lists; an output is left out when its input is."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer; raises E2102 or E1202, which ends tritonserver."""
        triton_log.install()
        parameters = python_backend.Parameters(args)
        self._tokenizer = parameters.tokenizer()
        self._encoder = PromptEncoder(self._tokenizer, parameters.count("max_input_len"))
        self._word_limits = parameters.word_limits()
        self._add_special_tokens = parameters.flag("add_special_tokens")
        self._defaults = {
            "END_ID": parameters.token_id("end_id"),
            "PAD_ID": parameters.token_id("pad_id"),
        }

    def execute(self, requests: list[Any]) -> list[Any]:
        """Encode each request; one that is refused gets its coded error."""
        responses = []
        for request in requests:
            try:
                check_parameters(python_backend.request_parameters(request), KNOWN_INPUTS)
                responses.append(
                    python_backend.response(self._encode(python_backend.input_tensors(request)))
                )
            except CogTritonError as error:
                responses.append(python_backend.error_response(error))
        return responses

    def _encode(self, tensors: Tensors) -> Tensors:
        bias = (tensors.get(f"EMBEDDING_BIAS_{name}") for name in ("WORDS", "WEIGHTS"))
        embedding_bias(None, *bias)
        pad_id = self._defaults["PAD_ID"] or 0
        if "PAD_ID" in tensors:
            pad_id = int(tensors["PAD_ID"].flat[0])
        encoded = {"REQUEST_OUTPUT_LEN": tensors["REQUEST_OUTPUT_LEN"]}
        for source, name, ids, length in _PROMPTS:
            texts = ["".join(row) for row in decode_strings(name, tensors.get(source))]
            if source == "QUERY" or any(texts):
                rows = [
                    encode_prompt(
                        self._encoder, name, text, add_special_tokens=self._add_special_tokens
                    )
                    for text in texts
                ]
                encoded[ids] = pad_rows(rows, pad_id)
                encoded[length] = np.array([[len(row)] for row in rows], dtype=np.int32)
        for source, name, target in _WORDS:
            words = decode_strings(name, tensors.get(source))
            for row in words:
                self._word_limits.check(name, row)
            word_ids = encode_word_lists(self._tokenizer, words)
            if word_ids is not None:
                encoded[target] = word_ids
        batch = encoded["REQUEST_INPUT_LEN"].shape
        for source, token in self._defaults.items():
            if source in tensors:
                encoded[f"OUT_{source}"] = tensors[source]
            elif token is not None:
                encoded[f"OUT_{source}"] = np.full(batch, token, dtype=np.int32)
        return encoded


class Postprocessing:
    """Decodes token ids, each response by itself."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer; raises E2102 or E1202, which ends tritonserver."""
        triton_log.install()
        parameters = python_backend.Parameters(args)
        self._tokenizer = parameters.tokenizer().tokenizer
        self._skip_special_tokens = parameters.flag("skip_special_tokens")

    def execute(self, requests: list[Any]) -> list[Any]:
        """Decode TOKENS_BATCH [batch, beam, n] up to SEQUENCE_LENGTH [batch, beam]."""
        return [self._decode(python_backend.input_tensors(request)) for request in requests]

    def _decode(self, tensors: Tensors) -> Any:
        tokens, lengths = tensors["TOKENS_BATCH"], tensors["SEQUENCE_LENGTH"]
        rows = tokens.reshape(lengths.size, -1).tolist()
        texts = self._tokenizer.decode_batch(
            [row[:length] for row, length in zip(rows, lengths.ravel().tolist(), strict=True)],
            skip_special_tokens=self._skip_special_tokens,
        )
        output = np.array([text.encode() for text in texts], dtype=object)
        return python_backend.response({"OUTPUT": output.reshape(lengths.shape)})
