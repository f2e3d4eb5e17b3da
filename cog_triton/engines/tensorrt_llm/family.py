"""TensorRT-LLM family: engines served by NVIDIA's C++ backend of Triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from cog_triton import errors
from cog_triton.artifact.engine_config import CONFIG_NAME, TENSORRT_LLM
from cog_triton.artifact.engine_manifest import adapter_directory
from cog_triton.artifact.lora_adapter import LoRALimits
from cog_triton.engines import tensor_contract
from cog_triton.engines.base import Abilities, EngineFamily, EngineLimits, ResumeRules
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.tensorrt_llm import (
    backend_errors,
    engine_directory,
    model_settings,
    runtime_settings,
)
from cog_triton.engines.tensorrt_llm.adapter_modules import task_id
from cog_triton.errors import ModelUnavailable
from cog_triton.sizing import model_files
from cog_triton.sizing.fit import Demand

_BECOMES = {"decoder_text_input": "decoder_input_ids"}
"""Inputs of the text models by the input of tensorrt_llm that they become."""
_INDICES = ("batch_index", "sequence_index")
"""Outputs that the text models make themselves, for engines of all releases."""


class TensorRTLLMFamily(EngineFamily):
    """TensorRT-LLM family, detected by its manifest, or by config.json and rank*.engine."""

    name = TENSORRT_LLM
    backend = "tensorrtllm"
    # Its prompt_ignore_length, tokens of the prompt that penalties leave out, is 0 by default.
    resume_rules = ResumeRules(
        frequency_penalty="sequence", presence_penalty="sequence", max_input_len=True
    )

    def __init__(self, engine: engine_directory.Engine) -> None:
        limits = engine.config.build_config
        super().__init__(
            engine.directory,
            EngineLimits(
                max_input_len=engine.config.longest_prompt(chunked=False),
                max_seq_len=limits.seq_len,
                max_batch_size=limits.max_batch_size,
                end_id=next(iter(engine.end_ids), None),
                pad_id=engine.pad_id,
            ),
        )
        self.engine = engine
        self._settings: Mapping[str, Any] = model_settings.defaults(engine)
        self._use(model_settings.fill(self._settings, engine))

    def _use(self, config: Any) -> None:
        """Take the inputs and outputs of this `config`, a template that is filled in."""
        self._config = config
        inputs = {tensor.name for tensor in config.input}
        self._older = {n: old for old, n in tensor_contract.ALIASES.items() if old in inputs}
        self._inputs = inputs | self._older.keys()

    @classmethod
    def matches(cls, directory: Path) -> bool:
        return engine_directory.matches(directory)

    @classmethod
    def open(cls, directory: Path) -> Self:
        return cls(engine_directory.read_engine(directory))

    @property
    def world_size(self) -> int:
        return self.engine.ranks

    def memory(self) -> Demand:
        limits = self.engine.config.build_config
        if limits.weight_streaming:
            raise ModelUnavailable(f"{self.directory}: its weights are streamed from the host")
        sizes = {path.name: path.stat().st_size for path in self.directory.glob("rank*.engine")}
        text = (self.directory / CONFIG_NAME).read_bytes()
        files, precision = model_files.of_engine(str(self.directory), text, sizes, limits.seq_len)
        return Demand(files=files, gpus=self.engine.ranks, precision=precision)

    @property
    def versions(self) -> Mapping[str, str]:
        return {"tensorrt_llm": self.engine.config.version}

    def render(self, config: Any, arguments: Mapping[str, Any]) -> None:
        """See `EngineFamily.render`; arguments are variables of NVIDIA's template.

        They go before the settings that the engine carries.
        """
        given = model_settings.given(arguments)
        carried = runtime_settings.below(given.keys(), self.engine.runtime)
        self._settings = {**model_settings.defaults(self.engine), **carried, **given}
        model_settings.check(self._settings, self.engine, carried.keys())
        self._use(model_settings.fill(self._settings, self.engine))
        known = {tensor.name for tensor in (*config.input, *config.output)}
        self._lacks = known - self._inputs - {tensor.name for tensor in self._config.output}
        config.CopyFrom(self._config)
        chunked = str(self._settings.get("enable_chunked_context")).lower() == "true"
        longest = self.engine.config.longest_prompt(chunked=chunked)
        self.limits = replace(self.limits, max_input_len=longest)

    @property
    def abilities(self) -> Abilities:
        """See `EngineFamily.abilities`; ``guided_decoding_backend`` turns guided decoding on."""
        guided = "guided_decoding_backend" in self._settings
        return Abilities(
            guides={"json_schema", "regex", "grammar"} if guided else frozenset(),
            sampling={"logit_bias"} if self._vocab_size is not None else frozenset(),
        )

    @property
    def _vocab_size(self) -> int | None:
        return self.engine.config.pretrained_config.vocab_size

    def lora_limits(self) -> LoRALimits:
        """See `EngineFamily.lora_limits`; what the engine was built for."""
        return engine_directory.adapter_limits(self.engine.config, self.directory)

    @property
    def adapters(self) -> Mapping[str, str]:
        """See `EngineFamily.adapters`; those that the engine was packed with."""
        return {
            name: str(self.directory.absolute() / adapter_directory(name))
            for name in self.engine.adapters
        }

    def adapt_text_model(self, config: Any) -> None:
        """See `EngineFamily.adapt_text_model`; without what the engine's release lacks."""
        types = {tensor.name: tensor.data_type for tensor in self._config.output}
        for tensors in (config.input, config.output):
            for place in reversed(range(len(tensors))):
                name = tensors[place].name
                if _BECOMES.get(name, name) in self._lacks and name not in _INDICES:
                    del tensors[place]
                elif name.endswith("_logits") and name in types:
                    tensors[place].data_type = types[name]
        own = {"end_id": self.limits.end_id, "pad_id": self.limits.pad_id}
        renamed = ",".join(f"{name}:{older}" for name, older in self._older.items())
        for key, value in {**own, "engine_input_names": renamed}.items():
            if key in config.parameters and value is not None:
                config.parameters[key].string_value = str(value)

    def encode_request(self, request: EngineRequest) -> dict[str, Any]:
        """See `EngineFamily.encode_request`; with the input names of the engine's release.

        Greedy decoding is sent as top_k 1, and the backend's defaults are left out: releases differ
        in which zeros they accept. Further end ids are sent as stop words, which the engine does
        not cut off; they are special tokens, without text. A model that is not decoupled refuses
        to stream.
        """
        if not self._config.model_transaction_policy.decoupled:
            whole = "exclude_input_in_output" in self._inputs
            request = replace(request, streaming=False, exclude_input_in_output=whole)
        if request.end_id is not None and request.end_id == self.limits.end_id:
            ends = tuple((token,) for token in self.engine.end_ids[1:])
            request = replace(request, stop_words=request.stop_words + ends)
        if request.sampling.temperature == 0:
            sampling = replace(request.sampling, temperature=1.0, top_k=1, top_p=0.0)
            request = replace(request, sampling=sampling)
        values = tensor_contract.encode_request(request)
        if request.adapter is not None and self.registry is not None:
            del values[tensor_contract.LORA_NAME]
            values["lora_task_id"] = task_id(self.registry.find(request.adapter).number)
        if bias := request.sampling.logit_bias:
            values["embedding_bias"] = self._embedding_bias(bias)
        if values["runtime_top_p"] == 0:
            del values["runtime_top_p"]
        for name in values.keys() - self._inputs:
            version = self.engine.config.version
            raise errors.InvalidArgument(
                f"{name}={values[name]!r}: TensorRT-LLM {version} does not have it"
            )
        return {self._older.get(name, name): value for name, value in values.items()}

    def _embedding_bias(self, bias: Mapping[int, float]) -> list[float]:
        size = self._vocab_size or 0
        if (highest := max(bias)) >= size:
            raise errors.InvalidArgument(
                f"logit_bias: {highest}: must be less than {size}, the model's vocabulary"
            )
        weights = [0.0] * size
        for token, value in bias.items():
            weights[token] = value
        return weights

    def classify_error(self, text: str) -> errors.CogTritonError:
        return (
            errors.from_text(text)
            or backend_errors.request_error(text)
            or errors.TritonUnknownError(text)
        )

    def classify_start_failure(self, log: str) -> errors.CogTritonError | None:
        return backend_errors.start_error(log)
