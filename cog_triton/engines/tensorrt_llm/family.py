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
    render_config,
    runtime_settings,
    setting_rules,
)
from cog_triton.engines.tensorrt_llm.adapter_modules import task_id
from cog_triton.engines.tensorrt_llm.backend_settings import Parameters
from cog_triton.errors import ModelUnavailable
from cog_triton.sizing import model_files
from cog_triton.sizing.demand import Demand


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
        self._parameters = render_config.resolve_defaults(Parameters(), engine)

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
        """See `EngineFamily.memory`."""
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
        """See `EngineFamily.render`; arguments are the fields of `Parameters`.

        They go before the settings that the engine carries.
        """
        chosen = runtime_settings.below(arguments, self.engine.runtime)
        parameters = render_config.resolve_defaults(Parameters.parse(chosen), self.engine)
        own = chosen.keys() - arguments.keys()
        setting_rules.check(parameters, self.engine, own)
        render_config.render_engine_config(config, parameters, self.engine)
        self._parameters = parameters
        chunked = parameters.enable_chunked_context
        longest = self.engine.config.longest_prompt(chunked=chunked)
        self.limits = replace(self.limits, max_input_len=longest)

    @property
    def abilities(self) -> Abilities:
        """See `EngineFamily.abilities`; ``guided_decoding_backend`` turns guided decoding on."""
        guided = self._parameters.guided_decoding_backend is not None
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
        render_config.adapt_text_config(config, self._parameters, self.engine)

    def encode_request(self, request: EngineRequest) -> dict[str, Any]:
        """See `EngineFamily.encode_request`; with the input names of the engine's release.

        Greedy decoding is sent as top_k 1, and the backend's defaults are left out: releases differ
        in which zeros they accept. Further end ids are sent as stop words, which the engine does
        not cut off; they are special tokens, without text. A model that is not decoupled refuses
        to stream.
        """
        if not self._parameters.decoupled_mode:
            whole = self.engine.contract.has_input("exclude_input_in_output")
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
        release = self.engine.contract
        for name in values:
            if not release.has_input(name):
                raise errors.InvalidArgument(
                    f"{name}={values[name]!r}: TensorRT-LLM {release.version} does not have it"
                )
        return {release.renamed.get(name, name): value for name, value in values.items()}

    def _embedding_bias(self, bias: Mapping[int, float]) -> list[float]:
        """A weight for each token of the vocabulary."""
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
