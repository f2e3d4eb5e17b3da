"""Sample engines as TensorRT-LLM and our builder write them, with manifests and tars."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

from cog_triton.artifact import engine_manifest, engine_tar
from cog_triton.artifact.engine_manifest import MANIFEST_NAME, FileEntry, Manifest

# TensorRT-LLM 0.7, cut to what tells something.
V0_7: dict[str, Any] = {
    "builder_config": {
        "name": "gpt",
        "precision": "float16",
        "tensor_parallel": 2,
        "num_layers": 2,
        "max_batch_size": 256,
        "max_beam_width": 1,
        "max_input_len": 200,
        "max_output_len": 200,
        "quant_mode": 0,
    },
    "plugin_config": {"gpt_attention_plugin": "float16", "paged_kv_cache": False},
}

# build_config and pretrained_config of TensorRT-LLM 0.9, cut to what tells something.
V0_9: dict[str, Any] = {
    "version": "0.9.0",
    "pretrained_config": {
        "architecture": "LlamaForCausalLM",
        "dtype": "float16",
        "logits_dtype": "float32",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "mapping": {"world_size": 2, "tp_size": 2, "pp_size": 1},
        "quantization": {"quant_algo": "W8A16", "kv_cache_quant_algo": None, "group_size": 128},
    },
    "build_config": {
        "max_input_len": 1024,
        "max_output_len": 512,
        "max_batch_size": 8,
        "max_beam_width": 4,
        "max_num_tokens": 8192,
        "strongly_typed": False,
        "plugin_config": {"gpt_attention_plugin": "float16", "paged_kv_cache": True},
    },
}

V1: dict[str, Any] = {
    "version": "1.2.1",
    "pretrained_config": {
        "architecture": "Qwen3ForCausalLM",
        "dtype": "bfloat16",
        "mapping": {
            "world_size": 4,
            "gpus_per_node": 8,
            "cp_size": 1,
            "tp_size": 2,
            "pp_size": 2,
            "moe_tp_size": 2,
        },
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        "runtime_defaults": None,
    },
    "build_config": {
        "max_input_len": 4096,
        "max_seq_len": 8192,
        "opt_batch_size": 8,
        "max_batch_size": 64,
        "max_beam_width": 1,
        "max_num_tokens": 8192,
        "kv_cache_type": "PAGED",
        "lora_config": {"lora_dir": []},
    },
}


def changed(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of `config` in which the key at `path`, dots between, has another value."""
    copy: dict[str, Any] = json.loads(json.dumps(config))
    *sections, key = path.split(".")
    place = copy
    for section in sections:
        place = place[section]
    place[key] = value
    return copy


def directory(path: Path, config: dict[str, Any], ranks: int) -> Path:
    """An engine directory of TensorRT-LLM's."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    for rank in range(ranks):
        (path / f"rank{rank}.engine").write_bytes(b"ftrt" + bytes([rank]) * 3000)
    return path


def contents(directory: Path) -> dict[str, bytes]:
    """The files below a directory, by name."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def original_tar(path: Path, engine: Path) -> Path:
    """Pack as the original cog-triton did: `tar -C DIR -cf engine.tar .`, without a manifest."""
    with tarfile.open(path, "w") as tar:
        tar.add(engine, ".")
    return path


def create(directory: Path, **given: Any) -> Manifest:
    """Write the manifest of the files in `directory`."""
    found = engine_manifest.files_of(directory)
    found.pop(MANIFEST_NAME, None)
    entries = {
        name: FileEntry(size=path.stat().st_size, sha256=engine_manifest.sha256_of(path))
        for name, path in found.items()
    }
    manifest = Manifest(**given, files=entries)
    (directory / MANIFEST_NAME).write_text(manifest.to_json())
    return manifest


def with_manifest(path: Path, /, **changes: Any) -> Path:
    """Write the manifest of an engine made of V1."""
    given: dict[str, Any] = {
        "engine": "tensorrt_llm",
        "model_id": "Qwen/Qwen3-8B",
        "config_sha256": "0" * 64,
        "versions": {"cuda": "13.0", "tensorrt": "10.13", "tensorrt_llm": "1.2.1"},
        "world_size": 4,
        "max_input_len": 4096,
        "max_seq_len": 8192,
        "max_batch_size": 64,
        "sm": [90],
        "gpu_name": "NVIDIA H200",
    }
    create(path, **{**given, **changes})
    return path


def pack(directory: Path, tar_path: Path) -> Path:
    """The tar of an engine directory; all but the files of its manifest is as it says."""
    held = engine_manifest.load(directory)
    assert held is not None
    members = engine_manifest.files_of(directory)
    del members[MANIFEST_NAME]
    return engine_tar.pack(
        members, tar_path, lambda files: held.model_copy(update={"files": files})
    )


def packed(tmp_path: Path, name: str = "engine.tar", **changes: Any) -> Path:
    """engine.tar of V1 with a manifest."""
    engine = with_manifest(directory(tmp_path / "engine", V1, 4), **changes)
    return pack(engine, tmp_path / name)


def small_tar(path: Path, **files: bytes) -> Path:
    """A tar of files; `__` in a keyword stands for the name's dot."""
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name.replace("__", "."))
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path
