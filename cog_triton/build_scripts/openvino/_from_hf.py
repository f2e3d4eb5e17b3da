"""A model in a Hugging Face directory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from cog_triton.artifact.safetensors_file import TensorEntry, read_header
from cog_triton.build_scripts.openvino import _model, _tokenizer
from cog_triton.build_scripts.openvino._gguf_file import Field, Tensor
from cog_triton.build_scripts.openvino._model import Checkpoint, Model
from cog_triton.build_scripts.openvino._script import read_json
from cog_triton.errors import EngineCorrupt, EngineIncompatible, ModelUnavailable

# A buffer that old checkpoints saved; it follows from rope_theta.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def index(directory: Path) -> dict[str, TensorEntry]:
    """Every tensor of a directory's ``*.safetensors``, by name.

    Raises:
        ModelUnavailable: a shard is missing, truncated or broken, or a name is there twice.
        EngineIncompatible: an element type other than F32, F16 or BF16.
    """
    shards = sorted(directory.glob("*.safetensors"))
    listing = directory / "model.safetensors.index.json"
    if listing.is_file():
        named = {str(name) for name in read_json(listing).get("weight_map", {}).values()}
        for name in sorted(named - {shard.name for shard in shards}):
            raise ModelUnavailable(f"{directory / name}: missing shard named in {listing.name}")
        shards = [shard for shard in shards if shard.name in named]
    found: dict[str, TensorEntry] = {}
    for shard in shards:
        try:
            header = read_header(shard)
        except EngineCorrupt as error:
            raise ModelUnavailable(error.detail) from error
        for name, tensor in header.items():
            if name in found:
                raise ModelUnavailable(f"{shard}: tensor {name} is also in {found[name].path.name}")
            found[name] = tensor
    if not found:
        raise ModelUnavailable(f"{directory}: no *.safetensors with tensors in it")
    return found


def read(directory: Path) -> Checkpoint:
    """The model in `directory`.

    Raises:
        ModelUnavailable: a file is missing or broken.
        EngineIncompatible: something the engine would not honour.
    """
    model = _model.load(directory)
    stored = _named(index(directory), model)
    tokenizer = read_json(directory / "tokenizer.json")
    config = _tokenizer_config(directory)
    fields = _model_fields(model)
    fields += _tokenizer.gguf_fields(tokenizer, config, model.vocab_size, model.special_ids())
    tensors = [_tensor(model, name, stored[name]) for name in model.tensors()]
    table = _model.divisors(model.rope, model.head_size)
    scaling = model.rope.scaling
    if table is not None and scaling is not None and scaling["rope_type"] == "llama3":
        tensors.append(Tensor("rope_freqs.weight", table.shape, "F32", lambda: table))
    text = (directory / "tokenizer.json").read_bytes().decode("utf-8")
    return Checkpoint(model, fields, tensors, table, text, config)


def _named(stored: dict[str, TensorEntry], model: Model) -> dict[str, TensorEntry]:
    """`stored` by GGUF name, complete and of the right shapes."""
    architecture = gguf.MODEL_ARCH[model.gguf_architecture.upper()]
    names = gguf.get_tensor_name_map(architecture, model.num_layers)
    found: dict[str, TensorEntry] = {}
    for name, tensor in stored.items():
        if _DERIVED.fullmatch(name):
            continue
        own = names.get_name(name, (".weight", ".bias"))
        if own is None or own in found:
            raise EngineIncompatible(f"tensor {name} has no place in a {model.architecture} engine")
        found[own] = tensor
    if model.tied:
        found.pop("output.weight", None)  # a copy of the embedding, saved by some tools
    model.check_tensors({name: tensor.shape for name, tensor in found.items()})
    return found


def _tensor(model: Model, name: str, stored: TensorEntry) -> Tensor:
    def floats() -> npt.NDArray[np.float32]:
        values = stored.floats()
        if model.gguf_architecture == "llama" and re.search(r"attn_[qk]\.weight$", name):
            values = _interleave(values, model.head_size)
        return values

    return Tensor(name, stored.shape, stored.dtype, floats)


def _interleave(weights: npt.NDArray[np.float32], head_size: int) -> npt.NDArray[np.float32]:
    """Reorder rows of each head from halves to pairs, as GGUF stores llama's rotary projections."""
    rows, columns = weights.shape
    halves = weights.reshape(rows // head_size, 2, head_size // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def _model_fields(model: Model) -> list[Field]:
    kinds, name = gguf.GGUFValueType, model.gguf_architecture
    counts = {
        "block_count": model.num_layers,
        "context_length": model.max_positions,
        "embedding_length": model.hidden_size,
        "feed_forward_length": model.intermediate_size,
        "attention.head_count": model.num_heads,
        "attention.head_count_kv": model.num_kv_heads,
        "attention.key_length": model.head_size,
        "attention.value_length": model.head_size,
        "rope.dimension_count": model.head_size,
        "vocab_size": model.vocab_size,
    }
    fields = [Field(f"{name}.{key}", value, kinds.UINT32) for key, value in counts.items()]
    floats = {
        "attention.layer_norm_rms_epsilon": model.norm_epsilon,
        "rope.freq_base": model.rope.theta,
    }
    scaling = model.rope.scaling
    if scaling is not None and scaling["rope_type"] == "linear":
        fields.append(Field(f"{name}.rope.scaling.type", "linear", kinds.STRING))
        floats["rope.scaling.factor"] = float(scaling["factor"])
    return fields + [Field(f"{name}.{key}", value, kinds.FLOAT32) for key, value in floats.items()]


def _tokenizer_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json, with the chat template included if it is a file of its own."""
    path = directory / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    jinja, wrapped = directory / "chat_template.jinja", directory / "chat_template.json"
    if jinja.is_file():
        config["chat_template"] = jinja.read_text("utf-8")
    elif wrapped.is_file():
        config["chat_template"] = read_json(wrapped)["chat_template"]
    if (directory / "tokenizer.model").is_file() and not (directory / "tokenizer.json").is_file():
        raise ModelUnavailable(f"{directory}: SentencePiece tokenizer.model without tokenizer.json")
    return config
