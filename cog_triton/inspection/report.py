"""Inspection report: an engine description as a table for 80 columns or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cog_triton.artifact.compatibility import sm_names
from cog_triton.artifact.engine_manifest import MANIFEST_NAME, Manifest
from cog_triton.artifact.seal import seal_of
from cog_triton.inspection.engine_description import EngineDescription, GpuCheck
from cog_triton.system.printable import printable

_UNKNOWN = "not recorded"


def as_json(engine: EngineDescription, check: GpuCheck | None) -> str:
    """JSON report; sizes in bytes, null for what is not recorded."""
    manifest, config = engine.manifest, engine.config
    pretrained = config.pretrained_config if config else None
    limits = config.build_config if config else None
    document = {
        "path": str(engine.contents.path),
        "kind": engine.contents.kind,
        "digest": engine.contents.digest,
        "compression": engine.contents.compression,
        "engine": engine.engine,
        "model_id": manifest.model_id if manifest else None,
        "revision": manifest.revision if manifest else None,
        "config_sha256": manifest.config_sha256 if manifest else None,
        "architecture": pretrained.architecture if pretrained else None,
        "dtype": pretrained.dtype if pretrained else None,
        "quantization": pretrained.quantization.model_dump()
        if pretrained and pretrained.quantization
        else None,
        "sm": manifest.sm if manifest else None,
        "gpu_name": manifest.gpu_name if manifest else None,
        "versions": engine.versions,
        "world_size": engine.world_size,
        "mapping": pretrained.mapping.model_dump(exclude={"world_size"}) if pretrained else None,
        "max_input_len": engine.max_input_len,
        "longest_prompt": engine.longest_prompt,
        "max_seq_len": engine.max_seq_len,
        "max_batch_size": engine.max_batch_size,
        "max_beam_width": limits.max_beam_width if limits else None,
        "max_num_tokens": limits.max_num_tokens if limits else None,
        "runtime": manifest.runtime if manifest else None,
        "lora_adapters": {name: each.model_dump() for name, each in manifest.lora_adapters.items()}
        if manifest
        else None,
        "seals": {name: one.model_dump() for name, one in manifest.seals.items()}
        if manifest
        else None,
        "weights": manifest.weights.model_dump() if manifest and manifest.weights else None,
        "manifest": manifest is not None,
        "manifest_sha256": engine.manifest_sha256,
        "size": engine.size,
        "files": {
            name: {**entry.model_dump(), "verified": engine.verified(name)}
            for name, entry in engine.contents.files.items()
        },
    }
    if check is not None:
        document["gpu_check"] = {"here": list(check.here), "problem": check.problem}
    return json.dumps(document, indent=2)


def as_table(engine: EngineDescription, check: GpuCheck | None) -> RenderableType:
    """Table report: facts, a row for each file, and the result of the checksums."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in _facts(engine, check):
        facts.add_row(name, _text(value))
    return Group(facts, _files(engine), _verdict(engine))


def _facts(engine: EngineDescription, check: GpuCheck | None) -> Iterator[tuple[str, str]]:
    manifest, config = engine.manifest, engine.config
    yield "engine", engine.engine
    yield "form", ", ".join(filter(None, (engine.contents.kind, engine.contents.compression)))
    if engine.contents.digest is not None:
        yield "digest", engine.contents.digest
    yield "model", manifest.model_id if manifest else _UNKNOWN
    if manifest and manifest.revision:
        yield "revision", manifest.revision
    if config:
        pretrained = config.pretrained_config
        quantization = pretrained.quantization
        parts = [pretrained.architecture, pretrained.dtype]
        if quantization and quantization.quant_algo:
            parts.append(f"weights {quantization.quant_algo}")
        if quantization and quantization.kv_cache_quant_algo:
            parts.append(f"KV cache {quantization.kv_cache_quant_algo}")
        yield "architecture", ", ".join(parts)
    yield "GPU", _gpu(engine)
    if check is not None:
        yield "this machine", _here(engine, check)
    yield "versions", ", ".join(f"{name} {version}" for name, version in engine.versions.items())
    yield "limits", ", ".join(_limits(engine))
    yield "ranks", _ranks(engine)
    if manifest and manifest.runtime:
        yield "runtime", ", ".join(f"{name} {value}" for name, value in manifest.runtime.items())
    if manifest and manifest.lora_adapters:
        adapters = manifest.lora_adapters.items()
        yield "LoRA", ", ".join(f"{name} (rank {each.rank})" for name, each in adapters)
    if manifest and manifest.schema_ >= 3:
        yield from _seals(manifest)
        yield "SEAL_SHA256", engine.manifest_sha256 or _UNKNOWN


def _seals(manifest: Manifest) -> Iterator[tuple[str, str]]:
    for name, one in manifest.seals.items():
        made = one.environment
        versions = {"vLLM": made.vllm, "torch": made.torch, "CUDA": made.cuda}
        yield (
            "sealed for",
            f"{made.gpu_name} (sm_{made.sm}), {made.ranks} ranks, driver {one.driver} or newer, "
            f"{', '.join(f'{key} {value}' for key, value in versions.items() if value)} "
            f"Python {made.python}: {len(one.aot)} models, started in {one.seconds:g} s, compiled"
            f" in {one.compile_seconds:g} s ({name})",
        )
    if manifest.weights is not None:
        held = manifest.weights.files.values()
        size = _mb(sum(entry.size for entry in held))
        where = manifest.weights.tar_url or manifest.weights.source
        yield "weights", f"{len(held)} files, {size} MB, fetched from {where} when it is served"


def _gpu(engine: EngineDescription) -> str:
    if engine.on_cpu:
        return "none, runs on the CPU"
    name = engine.manifest.gpu_name if engine.manifest else None
    return ", ".join(part for part in (sm_names(engine.sm), name) if part) or _UNKNOWN


def _here(engine: EngineDescription, check: GpuCheck) -> str:
    here = sm_names(check.here) or "no GPU"
    if check.problem:
        return f"{here}: does not fit" if engine.sm else f"{here}: cannot be compared"
    return f"{here}: fits"


def _limits(engine: EngineDescription) -> Iterator[str]:
    yield f"{engine.longest_prompt} input tokens"
    yield f"{engine.max_seq_len} with output"
    yield f"{engine.max_batch_size} requests at once"
    limits = engine.config.build_config if engine.config else None
    if limits and limits.max_num_tokens:
        yield f"{limits.max_num_tokens} tokens a step"
    if limits and (limits.max_beam_width or 1) > 1:
        yield f"{limits.max_beam_width} beams"


def _ranks(engine: EngineDescription) -> str:
    if engine.world_size == 1 or engine.config is None:
        return str(engine.world_size)
    mapping = engine.config.pretrained_config.mapping
    kinds = (("tp", mapping.tp_size), ("pp", mapping.pp_size), ("cp", mapping.cp_size))
    return f"{engine.world_size}: " + " x ".join(f"{k} {n}" for k, n in kinds if k != "cp" or n > 1)


def _files(engine: EngineDescription) -> Table:
    count = len(engine.contents.files)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
    table.add_column("file", f"{count} files", overflow="fold", ratio=1)
    table.add_column("MB", _mb(engine.size), justify="right", no_wrap=True)
    table.add_column("sha256", no_wrap=True)
    table.add_column("checked", no_wrap=True)
    seals: dict[str, list[str]] = {}
    for name, entry in engine.contents.files.items():
        if (owner := seal_of(name)) is not None:
            seals.setdefault(owner, []).append(name)
            continue
        checked = "ok" if engine.verified(name) else "-"
        table.add_row(_text(name), _mb(entry.size), entry.sha256[:12], checked)
    for owner, names in seals.items():
        size = sum(engine.contents.files[name].size for name in names)
        checked = "ok" if all(map(engine.verified, names)) else "-"
        table.add_row(_text(f"sealed/{owner}: {len(names)} files"), _mb(size), "", checked)
    return table


def _verdict(engine: EngineDescription) -> Text:
    if engine.manifest is None:
        return Text(
            f"No {MANIFEST_NAME}: for which GPU it was built is not recorded, and there are no"
            " checksums to hold the files against."
        )
    verified = sum(engine.verified(name) for name in engine.contents.files)
    others = len(engine.contents.files) - verified - 1
    if engine.contents.kind == "registry":
        return Text(
            f"{others} files were not fetched: sizes and sha256 are what {MANIFEST_NAME} says, and"
            " are compared with the files when the engine is pulled."
        )
    extra = f" Not named there: {others}." if others > 0 else ""
    return Text(f"All {verified} files are as {MANIFEST_NAME} says, by size and sha256.{extra}")


def _text(value: str) -> Text:
    """Escape control characters: names from an engine must not control the terminal."""
    return Text(printable(value), overflow="fold")


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f}"
