"""Inspection report: an engine description as a table for 80 columns or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cog_triton.artifact.compatibility import sm_names
from cog_triton.artifact.engine_manifest import MANIFEST_NAME, Manifest
from cog_triton.artifact.seal import seal_of
from cog_triton.inspection.description import Description
from cog_triton.system.printable import printable

_UNKNOWN = "not recorded"


def as_json(engine: Description, here: Sequence[int] | None) -> str:
    """JSON report; sizes in bytes, null for what is not recorded; `here` are the GPUs' SMs."""
    source, manifest, config, shape = engine.source, engine.manifest, engine.config, engine.shape
    pretrained = config.pretrained_config if config else None
    limits = config.build_config if config else None
    quantization = pretrained.quantization if pretrained else None
    document = {
        "path": source.name,
        "kind": source.kind,
        "digest": source.digest,
        "compression": source.compression,
        "whole": source.whole,
        "engine": engine.engine,
        **{key: getattr(manifest, key, None) for key in ("model_id", "revision", "config_sha256")},
        "architecture": getattr(pretrained or shape, "architecture", None),
        "dtype": getattr(pretrained or shape, "dtype", None),
        "quantization": quantization.model_dump() if quantization else None,
        **{key: getattr(manifest, key, None) for key in ("sm", "gpu_name")},
        "versions": engine.versions,
        "world_size": engine.world_size,
        "mapping": pretrained.mapping.model_dump(exclude={"world_size"}) if pretrained else None,
        "max_input_len": engine.max_input_len,
        "longest_prompt": engine.longest_prompt,
        "max_seq_len": engine.max_seq_len,
        "max_batch_size": engine.max_batch_size,
        **{key: getattr(limits, key, None) for key in ("max_beam_width", "max_num_tokens")},
        **{
            key: manifest.model_dump(include={key})[key] if manifest else None
            for key in ("runtime", "lora_adapters", "seals", "weights")
        },
        "parameters": shape.parameters if shape else None,
        "manifest": manifest is not None,
        "manifest_sha256": engine.manifest_sha256,
        "size": engine.size,
        "files": {
            name: {**file._asdict(), "verified": engine.verified(name)}
            for name, file in engine.files.items()
        },
    }
    if here is not None:
        document["gpu_check"] = {"here": list(here), "problem": engine.gpu_problem(here)}
    return json.dumps(document, indent=2)


def as_table(engine: Description, here: Sequence[int] | None) -> RenderableType:
    """Table report: facts, a row for each file, and the result of the checksums."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in _facts(engine, here):
        facts.add_row(name, _text(value))
    return Group(facts, _files(engine), Text(_verdict(engine)))


def _facts(engine: Description, here: Sequence[int] | None) -> Iterator[tuple[str, str]]:
    source, manifest, config = engine.source, engine.manifest, engine.config
    yield "engine", engine.engine or "none, a model"
    yield "form", ", ".join(filter(None, (source.kind, source.compression)))
    if source.digest is not None:
        yield "digest", source.digest
    if engine.engine is None:
        if shape := engine.shape:
            size = f"{shape.parameters / 1e9:.2f} billion parameters"
            yield "architecture", ", ".join(filter(None, (shape.architecture, shape.dtype, size)))
            yield "limits", f"{shape.max_len} tokens"
        return
    yield "model", manifest.model_id if manifest else _UNKNOWN
    if manifest and manifest.revision:
        yield "revision", manifest.revision
    if config:
        pretrained = config.pretrained_config
        parts = [pretrained.architecture, pretrained.dtype]
        if quantization := pretrained.quantization:
            given = {
                "weights": quantization.quant_algo,
                "KV cache": quantization.kv_cache_quant_algo,
            }
            parts += [f"{what} {how}" for what, how in given.items() if how]
        yield "architecture", ", ".join(parts)
    gpu = filter(None, (sm_names(engine.sm), manifest.gpu_name if manifest else None))
    yield "GPU", "none, runs on the CPU" if engine.on_cpu else ", ".join(gpu) or _UNKNOWN
    if here is not None:
        fits = "does not fit" if engine.sm else "cannot be compared"
        fits = fits if engine.gpu_problem(here) else "fits"
        yield "this machine", f"{sm_names(here) or 'no GPU'}: {fits}"
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


def _limits(engine: Description) -> Iterator[str]:
    yield f"{engine.longest_prompt} input tokens"
    yield f"{engine.max_seq_len} with output"
    yield f"{engine.max_batch_size} requests at once"
    limits = engine.config.build_config if engine.config else None
    if limits and limits.max_num_tokens:
        yield f"{limits.max_num_tokens} tokens a step"
    if limits and (limits.max_beam_width or 1) > 1:
        yield f"{limits.max_beam_width} beams"


def _ranks(engine: Description) -> str:
    if engine.world_size == 1 or engine.config is None:
        return str(engine.world_size)
    mapping = engine.config.pretrained_config.mapping
    kinds = (("tp", mapping.tp_size), ("pp", mapping.pp_size), ("cp", mapping.cp_size))
    return f"{engine.world_size}: " + " x ".join(f"{k} {n}" for k, n in kinds if k != "cp" or n > 1)


def _files(engine: Description) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
    table.add_column("file", f"{len(engine.files)} files", overflow="fold", ratio=1)
    table.add_column("MB", _mb(engine.size), justify="right", no_wrap=True)
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
        size = sum(engine.files[name].size for name in names)
        checked = "ok" if all(map(engine.verified, names)) else "-"
        table.add_row(_text(f"sealed/{owner}: {len(names)} files"), _mb(size), "", checked)
    return table


def _verdict(engine: Description) -> str:
    verified = sum(map(engine.verified, engine.files))
    others = len(engine.files) - verified - 1
    if engine.engine is None:
        return "A model has no manifest to compare its files with."
    if not engine.source.whole:
        return "Only the beginning of the tar was read: its files are compared when it is served."
    if engine.manifest is None:
        return (
            f"No {MANIFEST_NAME}: for which GPU it was built is not recorded, and there are no"
            " checksums to compare the files with."
        )
    if engine.source.kind == "registry":
        return (
            f"{others} files were not fetched: sizes and sha256 are what {MANIFEST_NAME} says, and"
            " are compared with the files when the engine is pulled."
        )
    extra = f" Not named there: {others}." if others > 0 else ""
    return f"All {verified} files are as {MANIFEST_NAME} says, by size and sha256.{extra}"


def _text(value: str) -> Text:
    """Escape control characters: names from an engine must not control the terminal."""
    return Text(printable(value), overflow="fold")


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f}"
