"""OpenVINO family: OpenVINO IR made by our own builder, served on the CPU."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cog_triton.artifact.lora_adapter import LoRALimits
from cog_triton.engines.base import Abilities, EngineFamily, EngineLimits, ResumeRules
from cog_triton.engines.engine_options import option, read_options
from cog_triton.engines.openvino import guides
from cog_triton.errors import (
    EngineCorrupt,
    EngineIncompatible,
    InvalidPredictorConfig,
)
from cog_triton.system.host_memory import host_memory

if TYPE_CHECKING:
    from cog_triton.settings import Settings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVINOConfig:
    """config.json of an OpenVINO engine directory; lengths in tokens.

    `kv_values_per_token` is the number of values that the KV cache holds of a token, in all layers;
    None where the config does not say.
    """

    vocab_size: int
    eos_ids: tuple[int, ...]
    pad_id: int | None
    max_input_len: int
    max_seq_len: int
    max_batch_size: int
    kv_values_per_token: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVINOOptions:
    """Run-time options: `max_batch_size` 0 means the engine's own, `num_threads` 0 all cores.

    `kv_cache_gb` is reserved at start; `max_num_batched_tokens` bounds the tokens of one
    step, prompts being split over steps so that running requests are not held up.
    `kv_cache_precision` is that of the cache's numbers: with f32, what a prompt and a step compute
    is the same, so that a text is the same alone, in a batch, and after a death of the engine.
    f16 holds twice and u8 four times as many tokens in as much memory, and texts part at near ties.
    """

    max_batch_size: int = 0
    kv_cache_gb: int = 1
    kv_cache_precision: str = "f32"
    max_num_batched_tokens: int = 512
    enable_kv_cache_reuse: bool = False
    num_threads: int = 0
    cancellation_check_period_ms: int = option(100, least=1)

    @classmethod
    def parse(cls, arguments: Mapping[str, Any]) -> Self:
        """Options from a serve config's or a model's parameters; raises E1202."""
        given = dict(arguments)
        if (name := "triton_max_batch_size") in given:
            if "max_batch_size" in given:
                raise InvalidPredictorConfig(
                    f"tensorrt_llm.args.{name} and max_batch_size are the same option"
                )
            given["max_batch_size"] = given.pop(name)
        options = read_options(cls, given, "an OpenVINO engine")
        if options.kv_cache_precision not in KV_BYTES:
            raise InvalidPredictorConfig(
                f"tensorrt_llm.args.kv_cache_precision={options.kv_cache_precision!r}: must be one"
                f" of {', '.join(KV_BYTES)}"
            )
        return options


KV_BYTES = {"f32": 4, "f16": 2, "u8": 0}
"""Bytes of a number of the KV cache, by `kv_cache_precision`; 0 where scales lie between them."""


def read_config(directory: Path) -> OpenVINOConfig:
    """Parse ``config.json`` of an engine directory; raises E1306 naming what is wrong."""
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text("utf-8"))
        model, build = raw["pretrained_config"], raw["build_config"]
        return OpenVINOConfig(
            vocab_size=_positive(model, "vocab_size"),
            eos_ids=_token_ids(model, "eos_token_id"),
            pad_id=next(iter(_token_ids(model, "pad_token_id")), None),
            max_input_len=_positive(build, "max_input_len"),
            max_seq_len=_positive(build, "max_seq_len"),
            max_batch_size=_positive(build, "max_batch_size"),
            kv_values_per_token=_kv_values_per_token(model),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineCorrupt(f"{path}: not an OpenVINO engine's config: {error!r}") from error


def _positive(section: Mapping[str, Any], key: str) -> int:
    value = section[key]
    if type(value) is not int or value < 1:
        raise ValueError(f"{key}={value!r}: must be a whole number, at least 1")
    return value


def _kv_values_per_token(model: Mapping[str, Any]) -> int | None:
    sizes = ("num_hidden_layers", "num_key_value_heads", "head_size")
    if any(name not in model for name in sizes):
        return None
    return 2 * math.prod(_positive(model, name) for name in sizes)


def _token_ids(section: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = section.get(key)
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if any(type(token) is not int for token in ids):
        raise ValueError(f"{key}={value!r}: must be a token id, or a list of them")
    return ids


class OpenVINOFamily(EngineFamily):
    """OpenVINO family, detected by ``openvino_model.xml``."""

    name = "openvino"
    engine_class = "cog_triton.engines.openvino.engine:OpenVINOPipeline"
    replicable = True
    resume_rules = ResumeRules(imports="always", replays=True)

    @property
    def abilities(self) -> Abilities:
        """See `EngineFamily.abilities`; it tells no more than the log probability of a token."""
        return Abilities(
            guides={"json_schema", "regex"},
            prompt_log_probs=True,
            sampling={"min_p"},
            structural_tags=True,
            check_guide=guides.check,
        )

    def lora_limits(self) -> LoRALimits:
        raise EngineIncompatible(
            f"{self.directory}: an OpenVINO engine takes no LoRA adapters: its pipeline wants the"
            ' same one for all requests of a batch ("LoRA adapters value must be the same for all'
            ' requests"), and one for each request is what adapters are for'
        )

    @classmethod
    def matches(cls, directory: Path) -> bool:
        return (directory / "openvino_model.xml").is_file()

    @classmethod
    def open(cls, directory: Path) -> Self:
        config = read_config(directory)
        if not (directory / "openvino_model.bin").is_file():
            raise EngineCorrupt(f"{directory / 'openvino_model.bin'}: missing")
        return cls(
            directory,
            EngineLimits(
                max_input_len=config.max_input_len,
                max_seq_len=config.max_seq_len,
                max_batch_size=config.max_batch_size,
                end_id=None,
                pad_id=config.pad_id,
            ),
        )

    def check_environment(self, settings: Settings) -> None:
        """Log weights against host memory: of mapped files, so that less of it serves, too."""
        super().check_environment(settings)
        size, here = (self.directory / "openvino_model.bin").stat().st_size, host_memory()
        short = size > here.free
        _log.log(
            logging.WARNING if short else logging.INFO,
            "%s: %.1f GiB of weights, %.1f GiB of memory are free (%s)%s",
            *(self.directory, size / 2**30, here.free / 2**30, here.limits),
            ": it will be slow, or end; serve a smaller model" if short else "",
        )

    def render(self, config: Any, arguments: Mapping[str, Any]) -> str:
        """See `EngineFamily.render`; arguments are the fields of `OpenVINOOptions`."""
        options = OpenVINOOptions.parse(arguments)
        size = options.max_batch_size or self.limits.max_batch_size
        return self.render_python(config, size, asdict(options))
