"""A tiny random decoder model on disk, and what it must compute: plain numpy, float64.

Written from the definition of the architectures, not from any engine: RMSNorm, rotary
positions in two halves, grouped-query attention, SwiGLU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = ["the quick brown fox jumps over the lazy dog", "pack my box with 12 dozen jugs"] * 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def tiny_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


@dataclass
class TinyModel:
    """Weights by Hugging Face name, and config.json."""

    config: dict[str, Any]
    weights: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def make(cls, architecture: str, seed: int = 0, **changes: Any) -> TinyModel:
        config: dict[str, Any] = {
            "architectures": [architecture],
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 512,
            "rms_norm_eps": 3e-5,
            "rope_theta": 5000.0,
            "tie_word_embeddings": False,
            "vocab_size": 320,
            "eos_token_id": [2, 0],
            "bos_token_id": 1,
            "dtype": "float32",
            **changes,
        }
        model = cls(config)
        random = np.random.default_rng(seed)

        def draw(*shape: int, scale: float = 0.15, mean: float = 0.0) -> np.ndarray:
            values = random.normal(mean, scale, shape).astype(np.float16)
            return values.astype(np.float32)

        hidden, inner, dim = 64, config["intermediate_size"], config["head_dim"]
        heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
        w = model.weights
        w["model.embed_tokens.weight"] = draw(config["vocab_size"], hidden, scale=1.0)
        w["model.norm.weight"] = draw(hidden, mean=1.0)
        if not config["tie_word_embeddings"]:
            w["lm_head.weight"] = draw(config["vocab_size"], hidden)
        for i in range(config["num_hidden_layers"]):
            p = f"model.layers.{i}."
            w[p + "input_layernorm.weight"] = draw(hidden, mean=1.0)
            w[p + "post_attention_layernorm.weight"] = draw(hidden, mean=1.0)
            for name, rows in (("q", heads), ("k", kv), ("v", kv)):
                w[p + f"self_attn.{name}_proj.weight"] = draw(rows * dim, hidden)
                if architecture.startswith("Qwen2"):
                    w[p + f"self_attn.{name}_proj.bias"] = draw(rows * dim, scale=0.5)
            if architecture.startswith("Qwen3"):
                w[p + "self_attn.q_norm.weight"] = draw(dim, mean=1.0)
                w[p + "self_attn.k_norm.weight"] = draw(dim, mean=1.0)
            w[p + "self_attn.o_proj.weight"] = draw(hidden, heads * dim)
            w[p + "mlp.gate_proj.weight"] = draw(inner, hidden)
            w[p + "mlp.up_proj.weight"] = draw(inner, hidden)
            w[p + "mlp.down_proj.weight"] = draw(hidden, inner)
        return model

    def save(self, directory: Path, *, shards: int = 1, bf16: bool = False) -> Path:
        """Write a Hugging Face directory; `bf16` stores every tensor as bfloat16."""
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        tiny_tokenizer().save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
        names = sorted(self.weights)
        for shard in range(shards):
            part = {name: self.weights[name] for name in names[shard::shards]}
            path = directory / f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            if bf16:
                write_bf16(path, part)
            else:
                save_file(part, path)
        return directory

    def rounded_to_bf16(self) -> TinyModel:
        return TinyModel(self.config, {k: from_bf16(to_bf16(v)) for k, v in self.weights.items()})

    def quantized(self, matrices: str, outer: str) -> TinyModel:
        """The model whose matrices went through GGUF types `matrices` and `outer`."""
        found = {}
        for name, value in self.weights.items():
            kind = outer if name.endswith(("embed_tokens.weight", "lm_head.weight")) else matrices
            if value.ndim > 1:
                kind_ = gguf.GGMLQuantizationType[kind]
                value = gguf.quants.dequantize(gguf.quants.quantize(value, kind_), kind_)
            found[name] = value
        return TinyModel(self.config, found)

    def logits(self, ids: list[int], inverse_frequencies: np.ndarray | None = None) -> np.ndarray:
        """Logits after every position: [len(ids), vocab_size]."""
        c, w = self.config, {k: v.astype(np.float64) for k, v in self.weights.items()}
        dim, heads = c["head_dim"], c["num_attention_heads"]
        groups = heads // c["num_key_value_heads"]
        if inverse_frequencies is None:
            inverse_frequencies = c["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
        angles = np.arange(len(ids))[:, None] * inverse_frequencies[None]
        cos, sin = (np.concatenate([f(angles)] * 2, axis=1) for f in (np.cos, np.sin))

        def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
            return x / np.sqrt((x * x).mean(-1, keepdims=True) + c["rms_norm_eps"]) * weight

        def rotate(x: np.ndarray) -> np.ndarray:
            turned = np.concatenate([-x[..., dim // 2 :], x[..., : dim // 2]], axis=-1)
            return x * cos[:, None] + turned * sin[:, None]

        x = w["model.embed_tokens.weight"][ids]
        future = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
        for i in range(c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            h = norm(x, w[p + "input_layernorm.weight"])
            split = {}
            for name in "qkv":
                y = h @ w[p + f"self_attn.{name}_proj.weight"].T
                y = (y + w.get(p + f"self_attn.{name}_proj.bias", 0.0)).reshape(len(ids), -1, dim)
                scale = w.get(p + f"self_attn.{name}_norm.weight")
                y = y if scale is None else norm(y, scale)
                y = rotate(y) if name in "qk" else y
                split[name] = y if name == "q" else np.repeat(y, groups, axis=1)
            scores = np.einsum("qhd,khd->hqk", split["q"], split["k"]) / np.sqrt(dim) + future
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            scores /= scores.sum(-1, keepdims=True)
            mixed = np.einsum("hqk,khd->qhd", scores, split["v"]).reshape(len(ids), -1)
            x = x + mixed @ w[p + "self_attn.o_proj.weight"].T
            h = norm(x, w[p + "post_attention_layernorm.weight"])
            gate = h @ w[p + "mlp.gate_proj.weight"].T
            up = h @ w[p + "mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[p + "mlp.down_proj.weight"].T
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        return norm(x, w["model.norm.weight"]) @ head.T

    def greedy(self, ids: list[int], count: int) -> list[int]:
        found = list(ids)
        for _ in range(count):
            found.append(int(self.logits(found)[-1].argmax()))
        return found[len(ids) :]


def to_bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.uint32) << 16).view(np.float32)


def write_bf16(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header, data = {}, b""
    for name, value in tensors.items():
        raw = to_bf16(value).tobytes()
        entry = {"dtype": "BF16", "shape": list(value.shape)}
        header[name] = {**entry, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def engine_logits(engine: Path, ids: list[int]) -> np.ndarray:
    """Logits of a built engine after every position, through OpenVINO itself, in float32."""
    import openvino as ov

    model = ov.Core().read_model(engine / "openvino_model.xml")
    settings = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    settings["KV_CACHE_PRECISION"] = "f32"
    request = ov.compile_model(model, "CPU", settings).create_infer_request()
    row = np.array([ids], np.int64)
    inputs = {
        "input_ids": row,
        "attention_mask": np.ones_like(row),
        "position_ids": np.arange(len(ids), dtype=np.int64)[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    return request.infer(inputs)["logits"][0]


def engine_greedy(engine: Path, ids: list[int], count: int) -> list[int]:
    """Greedy tokens of a built engine through the pipeline that serves it."""
    import openvino as ov
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.num_kv_blocks = 64
    settings = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f16"}
    settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = "0"
    pipe = openvino_genai.ContinuousBatchingPipeline(str(engine), scheduler, "CPU", settings)
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.apply_chat_template = count, True, False
    results = pipe.generate([ov.Tensor(np.array([ids], np.int64))], [config])
    return list(results[0].m_generation_ids[0])
