"""LLM API family: Hugging Face weights on TensorRT-LLM's PyTorch backend; imports none of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from cog_triton.engines.base import Abilities, EngineFamily, EngineLimits
from cog_triton.engines.llmapi.llmapi_directory import CONFIG_FILE, LLMAPIModel, read_model
from cog_triton.errors import EngineIncompatible, InvalidPredictorConfig, nearest
from cog_triton.system.redaction import HUB_TOKENS

_OPTIONS = {"engine_python": "", "cancellation_check_period_ms": "100"}


class LLMAPIFamily(EngineFamily):
    """LLM API family, detected by ``llmapi.yaml``."""

    name = "llmapi"
    engine_class = "cog_triton.engines.llmapi.llmapi_host:LLMAPIHost"
    secrets = HUB_TOKENS  # TensorRT-LLM downloads weights by itself

    def __init__(self, directory: Path, model: LLMAPIModel) -> None:
        limits = EngineLimits(
            max_input_len=model.max_input_len,
            max_seq_len=model.max_seq_len,
            max_batch_size=model.max_batch_size,
            end_id=None,
            pad_id=None,
        )
        super().__init__(directory, limits, model.tokenizer_dir)
        self._model = model

    @property
    def abilities(self) -> Abilities:
        """See `EngineFamily.abilities`; guides only with ``guided_decoding_backend``."""
        if not self._model.guides:
            return Abilities()
        return Abilities(guides={"json_schema", "regex", "grammar"})

    def lora_limits(self) -> Any:
        """See `EngineFamily.lora_limits`."""
        raise EngineIncompatible(
            f"{self.directory}: this server gives the LLM API no adapters by name; vLLM takes them"
        )

    @classmethod
    def matches(cls, directory: Path) -> bool:
        return (directory / CONFIG_FILE).is_file()

    @classmethod
    def open(cls, directory: Path) -> Self:
        """See `EngineFamily.open`; also raises E1201, E1202 and E1304 for what the file says."""
        return cls(directory, read_model(directory))

    def render(self, config: Any, arguments: Mapping[str, Any]) -> str:
        """See `EngineFamily.render`.

        ``engine_python`` is the Python that has TensorRT-LLM, if that is not Triton's own.
        """
        for name, value in arguments.items():
            if name not in _OPTIONS:
                raise InvalidPredictorConfig(
                    f"tensorrt_llm.args.{name}={value!r}: the LLM API's engine has no such option"
                    f"{nearest(name, list(_OPTIONS))}; its own are in {CONFIG_FILE}"
                )
        options = {**_OPTIONS, **{name: str(value) for name, value in arguments.items()}}
        period = options["cancellation_check_period_ms"]
        if not period.isdecimal() or not int(period):
            raise InvalidPredictorConfig(
                f"tensorrt_llm.args.cancellation_check_period_ms={period!r}: must be a whole"
                " number, at least 1"
            )
        return self.render_python(config, self.limits.max_batch_size, options)
