"""Description of an engine or a model, checked against its files, and its report."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cog_triton.artifact import engine_config, engine_manifest, engine_tar
from cog_triton.artifact.compatibility import gpu_problem
from cog_triton.artifact.engine_config import CONFIG_NAME, CPU_FAMILIES, TENSORRT_LLM, EngineConfig
from cog_triton.artifact.engine_manifest import MANIFEST_NAME, SEALED_ENGINE, File, Manifest
from cog_triton.artifact.seal import seal_of
from cog_triton.engines.tensorrt_llm import runtime_settings
from cog_triton.errors import BuildConfigInvalid, EngineCorrupt, InvalidArgument
from cog_triton.sizing import model_files
from cog_triton.sizing.memory_sum import ModelShape
from cog_triton.sources.source import Source, no_engine
from cog_triton.system.printable import printable

_MAX_SHOWN = 5
_OURS = (TENSORRT_LLM, *CPU_FAMILIES)
_RECORDED = ("runtime", "lora_adapters", "seals", "weights")
_MOST = 16
_NOT_SHOWN = ("files", "size", "whole", "manifest", "gpu_check")


@dataclass(frozen=True, slots=True)
class Description:
    """A complete engine, or a model.

    An engine has a `manifest`, unless the original cog-triton made it, or a `config`, unless its
    family has none of ours; a model has neither, but mostly a `shape`.
    """

    source: Source
    files: Mapping[str, File]
    manifest: Manifest | None = None
    config: EngineConfig | None = None
    shape: ModelShape | None = None

    @property
    def engine(self) -> str | None:
        """The family; None for a model."""
        return getattr(self.manifest or self.config, "engine", None)

    @property
    def on_cpu(self) -> bool:
        """Whether it is an engine that needs no GPU."""
        return self.engine in CPU_FAMILIES

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of what built it."""
        if self.manifest is not None or self.config is None or not self.config.version:
            return self.manifest.versions if self.manifest else {}
        writer = TENSORRT_LLM if self.engine == TENSORRT_LLM else "cog_triton"
        return {writer: self.config.version}

    @property
    def sm(self) -> list[int]:
        """Compute capabilities that it was built for, 90 for 9.0; empty if not recorded."""
        return self.manifest.sm if self.manifest else []

    @property
    def limits(self) -> Mapping[str, int | None]:
        """Ranks, lengths in tokens, and sequences of a batch."""
        if self.manifest is not None:
            return {key: getattr(self.manifest, key) for key in _limits(None)}
        if self.config is None and self.shape is not None:
            return {**_limits(None), "max_seq_len": self.shape.max_len}
        return _limits(self.config)

    def verified(self, name: str) -> bool:
        """Whether the file was read, and has a checksum in the manifest, which it matched."""
        listed = self.manifest is not None and name in self.manifest.files
        was_read = self.source.kind != "registry" or self.source.read(name) is not None
        return listed and was_read and self.files[name].sha256 is not None

    def gpu_problem(self, here: Sequence[int]) -> str | None:
        """Why the engine cannot run on GPUs of these SMs; None if it can.

        Raises:
            InvalidArgument: it is a model.
        """
        name, ranks = self.source.name, self.limits["world_size"] or 1
        if self.engine is None:
            raise InvalidArgument(
                f"--check-gpu: is for engines, and {name} is a model: run cog-triton doctor {name}"
            )
        if self.on_cpu:
            return None
        if not self.sm and self.engine != SEALED_ENGINE:
            why = "its manifest names none" if self.manifest else f"it has no {MANIFEST_NAME}"
            return f"{name}: the GPU that it was built for is not recorded: {why}"
        sm = () if self.engine == SEALED_ENGINE else self.sm  # which compiles where no seal fits
        return gpu_problem(name, sm, ranks, 1, here)

    def facts(self, here: Sequence[int] | None = None) -> dict[str, Any]:
        """All that is known, for JSON; sizes in bytes, None for what is not recorded.

        Args:
            here: SMs of this machine's GPUs, to be compared.
        """
        source, manifest, config = self.source, self.manifest, self.config
        pretrained = config.pretrained_config if config else None
        model = pretrained or self.shape
        quantization = pretrained.quantization if pretrained else None
        text = source.read(MANIFEST_NAME) if manifest else None
        longest = config.longest_prompt(chunked=False) if config else self.limits["max_input_len"]
        found = {
            "engine": self.engine,
            "path": source.name,
            "kind": source.kind,
            "digest": source.digest,
            "compression": source.compression,
            "whole": source.whole,
            **_values(manifest, "model_id", "revision", "config_sha256"),
            **_values(model, "architecture", "dtype", "parameters"),
            "quantization": quantization.model_dump() if quantization else None,
            **_values(manifest, "sm", "gpu_name"),
            "versions": self.versions,
            **self.limits,
            "longest_prompt": longest,
            **_values(config.build_config if config else None, "max_beam_width", "max_num_tokens"),
            "mapping": pretrained.mapping.model_dump(exclude={"world_size"})
            if pretrained
            else None,
            **(
                manifest.model_dump(include={*_RECORDED}) if manifest else _values(None, *_RECORDED)
            ),
            "manifest": manifest is not None,
            "manifest_sha256": hashlib.sha256(text).hexdigest() if text else None,
            "size": sum(file.size for file in self.files.values()),
            "files": {
                name: {**file._asdict(), "verified": self.verified(name)}
                for name, file in self.files.items()
            },
        }
        if here is not None:
            found["gpu_check"] = {"here": list(here), "problem": self.gpu_problem(here)}
        return found


def _values(of: object, *keys: str) -> dict[str, Any]:
    return {key: getattr(of, key, None) for key in keys}


def _limits(config: EngineConfig | None) -> dict[str, int | None]:
    limits = config.build_config if config else None
    return {
        "world_size": config.pretrained_config.mapping.ranks if config else None,
        "max_input_len": limits.max_input_len if limits else None,
        "max_seq_len": limits.seq_len if limits else None,
        "max_batch_size": limits.max_batch_size if limits else None,
    }


def describe(source: Source, *, checksums: bool = True) -> Description:
    """Describe an engine, whose files are compared with its manifest, or a model.

    Args:
        checksums: whether files on this machine are read to compare their SHA-256, too.

    Raises:
        EngineCorrupt: a file is missing, or differs from the manifest, or the manifest and
            config.json disagree; names the file and the rule.
        ModelUnavailable: it cannot be had.
    """
    files = source.files(checksums=checksums)
    if not source.is_engine:
        with suppress(BuildConfigInvalid):  # of an architecture that names its sizes otherwise
            if source.read(CONFIG_NAME) is not None:
                return Description(source, files, shape=model_files.describe(source).shape)
        return Description(source, files)
    manifest = config = None
    name, text = source.name, source.read(MANIFEST_NAME)
    if text is not None:
        manifest = engine_manifest.parse(text, f"{name}: {MANIFEST_NAME}")
        compare = engine_tar if source.kind in ("tar", "url") else engine_manifest
        if source.whole and (problems := compare.differences(manifest, files)):
            more = len(problems) - _MAX_SHOWN
            tail = f"; and {more} more" if more > 0 else ""
            raise EngineCorrupt(f"{name}: {'; '.join(problems[:_MAX_SHOWN])}{tail}")
    elif source.read(CONFIG_NAME) is None:
        raise EngineCorrupt(no_engine(source))
    if manifest is None or manifest.engine in _OURS:
        config = _config(source, files)
        if config.engine == TENSORRT_LLM:
            runtime_settings.of_manifest(manifest, name)
        for key, found in {"engine": config.engine, **_limits(config)}.items():
            if manifest is not None and (said := getattr(manifest, key)) != found:
                raise EngineCorrupt(
                    f"{name}: {key}: {MANIFEST_NAME} says {said!r}, {CONFIG_NAME} {found!r}"
                )
    return Description(source, files, manifest, config)


def _config(source: Source, files: Mapping[str, File]) -> EngineConfig:
    name, text = source.name, source.read(CONFIG_NAME)
    if text is None:
        raise EngineCorrupt(f"{name}: {CONFIG_NAME} is missing: every engine has one")
    config = engine_config.parse(text, f"{name}: {CONFIG_NAME}")
    if config.engine not in _OURS:
        rule = f"must be one of {', '.join(_OURS)}"
        raise EngineCorrupt(f"{name}: {CONFIG_NAME}: engine: {config.engine!r}: {rule}")
    sizes = {file: found.size for file, found in files.items()}
    if source.whole and (problem := engine_config.missing_file(config, sizes)):
        raise EngineCorrupt(f"{name}: {problem}")
    return config


def as_table(engine: Description, facts: Mapping[str, Any]) -> RenderableType:
    """Its `facts`, a row for each file, and the result of the checksums."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if name not in _NOT_SHOWN and (text := _shown(value)):
            table.add_row(name, _text(text))
    if check := facts.get("gpu_check"):
        table.add_row("this machine", _text(check["problem"] or "fits"))
    return Group(table, _files(engine, facts["size"]), Text(_verdict(engine)))


def _shown(value: Any) -> str:
    """A value as text; empty for what is not recorded."""
    if isinstance(value, dict):
        if len(value) > _MOST:
            return f"{len(value)} entries"
        texts = ((key, one, _shown(one)) for key, one in value.items())
        found = (f"{k} ({t})" if isinstance(one, dict) else f"{k} {t}" for k, one, t in texts if t)
        return ", ".join(found)
    if isinstance(value, list):
        return ", ".join(map(_shown, value[:_MOST]))
    return "" if value is None else str(value)


def _files(engine: Description, size: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
    table.add_column("file", f"{len(engine.files)} files", overflow="fold", ratio=1)
    table.add_column("MB", _mb(size), justify="right", no_wrap=True)
    table.add_column("sha256", no_wrap=True)
    table.add_column("checked", no_wrap=True)
    seals: dict[str, list[str]] = {}
    for name, file in engine.files.items():
        if (owner := seal_of(name)) is not None:
            seals.setdefault(owner, []).append(name)
            continue
        checked = "ok" if engine.verified(name) else "-"
        table.add_row(_text(name), _mb(file.size), (file.sha256 or "-")[:12], checked)
    for owner, names in seals.items():
        total = sum(engine.files[name].size for name in names)
        checked = "ok" if all(map(engine.verified, names)) else "-"
        table.add_row(_text(f"sealed/{owner}: {len(names)} files"), _mb(total), "", checked)
    return table


def _verdict(engine: Description) -> str:
    verified = sum(map(engine.verified, engine.files))
    others = len(engine.files) - verified - 1
    if engine.engine is None:
        return "A model has no manifest to compare its files with."
    if not engine.source.whole:
        return "Only the beginning of the tar was read: its files are compared when it is served."
    if engine.manifest is None:
        return f"No {MANIFEST_NAME}: its GPU is not recorded, and there are no checksums."
    if engine.source.kind == "registry":
        return f"{others} files were not fetched: sizes and sha256 are {MANIFEST_NAME}'s."
    extra = f" Not named there: {others}." if others > 0 else ""
    return f"All {verified} files are as {MANIFEST_NAME} says, by size and sha256.{extra}"


def _text(value: str) -> Text:
    """Escape control characters: names from an engine must not control the terminal."""
    return Text(printable(value), overflow="fold")


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f}"
