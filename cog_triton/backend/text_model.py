"""Triton models ``ensemble`` and ``tensorrt_llm_bls``: text in, text out."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from cog_triton.backend import text_inputs
from cog_triton.backend.answers import TextPart
from cog_triton.backend.engine_model import Asked, EngineModel
from cog_triton.backend.text_inputs import KNOWN_INPUTS, OWN_OUTPUTS, InputOptions, Prompt, Tensors
from cog_triton.backend.triton_engine import ModelRequest, TritonEngine
from cog_triton.engines.base import REQUEST_DECODER
from cog_triton.engines.tensor_contract import ALIASES, check_parameters
from cog_triton.text.prompt_encoder import PromptEncoder

_SHORT = 4096
"""Bytes of prompts that are encoded at once, in about a millisecond."""


class TritonPythonModel(EngineModel):
    """A client of engines in processes, or of the model of one that computes inside tritonserver.

    The parameter ``request_decoder`` is set for the former: it makes their requests of tensors.
    """

    def connect(self) -> Any:
        module, _, function = self.parameters.optional(REQUEST_DECODER).partition(":")
        self._decode = getattr(importlib.import_module(module), function) if module else None
        if self._decode is not None:
            return super().connect()
        name = self.parameters.text("tensorrt_llm_model_name")
        return TritonEngine(name, self.parameters.outputs)

    def setup(self, args: Mapping[str, str]) -> None:
        parameters = self.parameters
        tokenizer = parameters.tokenizer()
        self._accumulate = parameters.flag("accumulate_tokens")
        self._options = InputOptions(
            model=self.name,
            tokenizer=tokenizer,
            encoder=PromptEncoder(tokenizer, parameters.count("max_input_len")),
            word_limits=parameters.word_limits(),
            add_special_tokens=parameters.flag("add_special_tokens"),
            engine_names=parameters.names("engine_input_names"),
            end_id=parameters.token_id("end_id"),
            pad_id=parameters.token_id("pad_id"),
            decoupled=self.decoupled,
            engine_streams=self._decode is not None or parameters.flag("engine_streams"),
            excludes_input="exclude_input_in_output" in parameters.inputs,
            takes_bias=self._decode is None,
        )

    def takes_long(self, inputs: Tensors) -> bool:
        return "text_input" in inputs and sum(map(len, inputs["text_input"].flat)) > _SHORT

    def parse(self, asked: Asked) -> Sequence[TextPart]:
        check_parameters(asked.parameters, KNOWN_INPUTS)
        inputs = dict(asked.inputs)
        text_inputs.rename(inputs, ALIASES)
        prompts = [text_inputs.to_prompt(self._options, row) for row in text_inputs.split(inputs)]
        return [
            TextPart(
                self._request(prompt, asked),
                self._options.tokenizer,
                prompt,
                asked.outputs,
                batch_index=place,
                accumulate=self._accumulate,
            )
            for place, prompt in enumerate(prompts)
        ]

    def _request(self, prompt: Prompt, asked: Asked) -> Any:
        if self._decode is not None:
            return self._decode(prompt.engine)
        outputs = [name for name in asked.outputs if name not in OWN_OUTPUTS]
        if prompt.sequences > 1:
            outputs.append("sequence_index")
        return ModelRequest(f"{asked.request_id}-{uuid.uuid4().hex}", prompt.engine, outputs)
