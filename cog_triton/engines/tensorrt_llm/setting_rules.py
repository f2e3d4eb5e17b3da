"""Setting rules: ten mistakes that cost GPU hours, refused before Triton starts.

The backend finds them after it has loaded the engine, or answers with other behaviour than was
requested. All other values and combinations are left to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from cog_triton.engines.tensorrt_llm import model_settings
from cog_triton.engines.tensorrt_llm.engine_directory import SPECULATIVE, Engine
from cog_triton.errors import InvalidPredictorConfig
from cog_triton.settings.environment_types import IMAGE_ENGINE_DIR

Rule = Callable[[str, Engine, Mapping[str, str]], str | None]
"""What a value would have to be for this engine, given all settings; None if it is."""


def check(values: Mapping[str, Any], engine: Engine, own: Collection[str] = ()) -> None:
    """Raise E1202 naming every setting that breaks a rule, with its value and the rule.

    `own` are names of those that the engine carries itself.
    """
    broken = [
        f"tensorrt_llm.args.{name}={values[name]!r}: {rule}"
        + ("; it is one that the engine carries, and a serve config overrides" * (name in own))
        for name, rule in problems(values, engine)
    ]
    if broken:
        raise InvalidPredictorConfig("; ".join(broken))


def problems(values: Mapping[str, Any], engine: Engine) -> Iterator[tuple[str, str]]:
    """Every setting that breaks a rule: its name and the rule, see `check`."""
    settings = {name: model_settings.notation(name, value) for name, value in values.items()}
    for name, rule in RULES.items():
        if name in settings and (must := rule(settings[name], engine, settings)):
            yield name, must


def _at_most(value: str, limit: int, name: str) -> str | None:
    if value.isdecimal() and 1 <= int(value) <= limit:
        return None
    return f"must be a whole number, and not be above the engine's {name}, {limit}"


def _batch(value: str, engine: Engine, settings: Mapping[str, str]) -> str | None:
    return _at_most(value, engine.config.build_config.max_batch_size, "max_batch_size")


def _beams(value: str, engine: Engine, settings: Mapping[str, str]) -> str | None:
    return _at_most(value, engine.config.build_config.max_beam_width or 1, "max_beam_width")


def _paged(value: str, engine: Engine, settings: Mapping[str, str]) -> str | None:
    if value.lower() not in ("true", "false"):
        return "must be true or false"
    if value.lower() == "false" or engine.paged_context:
        return None
    limits = engine.config.build_config
    return (
        "needs an engine built with a paged KV cache and use_paged_context_fmha; this one has"
        f" paged KV cache {limits.paged_kv_cache} and use_paged_context_fmha"
        f" {bool(limits.plugin_config.use_paged_context_fmha)}"
    )


def _share(value: str, engine: Engine, settings: Mapping[str, str]) -> str | None:
    try:
        return None if 0 < float(value) < 1 else "must be greater than 0 and less than 1"
    except ValueError:
        return "must be a number"


def _served(value: str, engine: Engine, settings: Mapping[str, str]) -> str | None:
    served = engine.directory.resolve()
    if Path(value) == IMAGE_ENGINE_DIR or Path(value).resolve() == served:
        return None
    return f"{served} is served: say which by ENGINE_DIR or COG_WEIGHTS"


def _nodes(value: str, engine: Engine, settings: Mapping[str, str]) -> str | None:
    if value.isdecimal() and int(value) and not engine.ranks % int(value):
        return None
    return f"the engine has {engine.ranks} ranks, which must be equally many on each"


def _gpus(value: str, engine: Engine, settings: Mapping[str, str]) -> str | None:
    nodes = settings.get("num_nodes", "1")
    count = engine.ranks // max(int(nodes), 1) if nodes.isdecimal() else engine.ranks
    for group in value.split(";"):
        ids = [number.strip() for number in group.split(",")]
        if len(ids) != count or len({*ids}) != count or not all(map(str.isdecimal, ids)):
            return f"must be {count} different ids, of 0 or more, for each instance"
    return None


def _mode(value: str, engine: Engine, settings: Mapping[str, str]) -> str | None:
    own = engine.decoding_mode
    if value == own or (own is None and value not in SPECULATIVE.values()):
        return None
    built = own or "none of the speculative ones"
    return f"the engine was built for {built} (speculative_decoding_mode)"


def _logits(value: str, engine: Engine, settings: Mapping[str, str]) -> str | None:
    expected = model_settings.defaults(engine)["logits_datatype"]
    kind = engine.config.pretrained_config.logits_dtype
    return None if value == expected else f"must be {expected}: the engine's is {kind}"


RULES: Mapping[str, Rule] = {
    "triton_max_batch_size": _batch,
    "max_beam_width": _beams,
    "enable_chunked_context": _paged,
    "enable_kv_cache_reuse": _paged,
    "kv_cache_free_gpu_mem_fraction": _share,
    "engine_dir": _served,
    "num_nodes": _nodes,
    "gpu_device_ids": _gpus,
    "decoding_mode": _mode,
    "logits_datatype": _logits,
}
