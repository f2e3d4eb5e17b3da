"""LoRA adapters of a build: fetched, and checked against the base before any step."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cog_triton.artifact import lora_adapter
from cog_triton.artifact.engine_config import EngineConfig
from cog_triton.artifact.engine_manifest import AdapterEntry, adapter_directory
from cog_triton.artifact.lora_adapter import LoRAAdapter, LoRALimits
from cog_triton.builder.config import AdapterSource, BuildConfig, SourceConfig, target_modules
from cog_triton.builder.workspace import Echo
from cog_triton.download.adapter_source import fetch_adapter
from cog_triton.download.model_request import json_object
from cog_triton.engines.tensorrt_llm import adapter_tensors, engine_directory
from cog_triton.errors import CogTritonError, EngineIncompatible
from cog_triton.settings import load_group
from cog_triton.settings.engine import EngineSettings
from cog_triton.system.paths import expanded
from cog_triton.system.redaction import redact_address


@dataclass(frozen=True)
class PackedAdapter:
    """An adapter for engine.tar, as PEFT saved it."""

    name: str
    entry: AdapterEntry
    adapter: LoRAAdapter

    def write(self, engine: Path) -> None:
        """Put it into an engine's directory, with the tensors that TensorRT-LLM takes."""
        place = engine / adapter_directory(self.name)
        place.mkdir(parents=True)
        for file in lora_adapter.FILES:
            shutil.copyfile(self.adapter.directory / file, place / file)
        adapter_tensors.save_tensors(self.adapter, place)


def fetch(config: BuildConfig, model: Path, store: Path, echo: Echo) -> list[PackedAdapter]:
    """Fetch the adapters of `config`, and check them against the model in `model`.

    Args:
        store: where what is downloaded stays.

    Raises:
        ModelUnavailable: one cannot be had.
        EngineCorrupt, EngineIncompatible: one is broken, or does not fit; each names it.
        DiskFull: there is no room.
    """
    limits = limits_of(config, model)
    packed = []
    for name, wanted in config.lora_adapters.items():
        with naming(name):
            directory, revision = fetch_source(config, wanted, store, echo)
            adapter = _read(directory, limits)
            echo(_line(name, adapter, config, revision))
            packed.append(PackedAdapter(name, entry_of(wanted, adapter, revision), adapter))
    return packed


def fetch_source(
    config: SourceConfig, wanted: AdapterSource, store: Path, echo: Echo
) -> tuple[Path, str | None]:
    """Fetch one adapter of `config`; its directory and revision. Raises as `fetch_adapter`."""
    fetched = fetch_adapter(
        wanted.source,
        Path(),
        store,
        load_group(EngineSettings).max_lora_bytes,
        echo,
        token=config.request.token,
        revision=wanted.revision,
        sha256=wanted.sha256,
    )
    return fetched.path, fetched.revision


def entry_of(wanted: AdapterSource, adapter: LoRAAdapter, revision: str | None) -> AdapterEntry:
    """What a manifest says of an adapter."""
    return AdapterEntry(
        source=redact_address(wanted.source),
        revision=revision,
        rank=adapter.rank,
        base_model=adapter.base_model,
    )


def look(config: BuildConfig, model: Path | None) -> Iterator[str]:
    """A line for each adapter, before anything is fetched; those that are here are checked.

    Args:
        model: the base model, if that is here.

    Raises:
        EngineCorrupt, EngineIncompatible: one that is here is broken, or does not fit.
    """
    for name, wanted in config.lora_adapters.items():
        here = _here(wanted)
        if here is None:
            yield f"{name}: {redact_address(wanted.source)}: checked when it is fetched"
            continue
        with naming(name):
            adapter = _read(here, limits_of(config, model))
            yield _line(name, adapter, config, None).removeprefix("[lora] ")


def check_built(packed: Sequence[PackedAdapter], built: EngineConfig, engine_dir: Path) -> None:
    """Check adapters against the engine that was built, whose config.json is `built`.

    Raises:
        EngineIncompatible: it takes none, or not one of them.
    """
    for each in packed:
        with naming(each.name):
            limits = engine_directory.adapter_limits(built, engine_dir)
            lora_adapter.check_adapter(each.adapter, limits)


def limits_of(config: BuildConfig, model: Path | None) -> LoRALimits:
    """What adapters the engine of `config` will take; sizes only with the base model's directory.

    Raises:
        EngineIncompatible: none, as its dtype is another than float16.
    """
    for name, step in config.steps():
        if (dtype := step.args.get("dtype")) not in (None, "auto", "float16"):
            raise EngineIncompatible(
                f"lora_adapters: {name}.args.dtype: {dtype!r}: must be float16: Triton's model has"
                " lora_weights in FP16, and TensorRT-LLM takes them in the model's own type alone"
            )
    args = config.build.args
    rank = args.get("max_lora_rank")
    shape = {} if model is None else json_object(model / "config.json")
    return LoRALimits(
        max_rank=rank if isinstance(rank, int) else engine_directory.MAX_LORA_RANK,
        max_loras=1,
        modules=engine_directory.modules_of(target_modules(args)),
        hidden_size=_size(shape, "hidden_size", "n_embd"),
        layers=_size(shape, "num_hidden_layers", "n_layer"),
    )


def _size(shape: Mapping[str, object], *names: str) -> int | None:
    found = [value for name in names if isinstance(value := shape.get(name), int)]
    return found[0] if found else None


def _here(wanted: AdapterSource) -> Path | None:
    path = expanded(wanted.source)
    return path if path.is_dir() else None


def _read(directory: Path, limits: LoRALimits) -> LoRAAdapter:
    adapter = lora_adapter.read_adapter(directory)
    lora_adapter.check_adapter(adapter, limits)
    adapter_tensors.rows_of(adapter)
    return adapter


def _line(name: str, adapter: LoRAAdapter, config: BuildConfig, revision: str | None) -> str:
    kinds = ", ".join(dict.fromkeys(module.kind for module in adapter.modules))
    at = f", {revision}" if revision else ""
    base = adapter.base_model
    other = f"; it was trained on {base!r}" if base and base != config.model_id else ""
    return f"[lora] {name}: rank {adapter.rank} of {kinds}{at}{other}"


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Context in which coded errors begin with the adapter's place in the config."""
    try:
        yield
    except CogTritonError as error:
        if error.detail.startswith("lora_adapters"):
            raise
        raise type(error)(f"lora_adapters.{name}: {error.detail}") from error
