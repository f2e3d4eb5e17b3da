"""Names of a model's layers: transformers' for each of TensorRT-LLM's, by family."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LayerNames:
    """Where transformers keeps what TensorRT-LLM calls by the names on the left.

    A name stands for its weight and, where there is one, its bias.
    """

    layers: str
    """What holds the layers: ``layers`` + ``.0.`` begins a name."""
    top: dict[str, str]
    """Outside of the layers; without ``lm_head``, that is the embedding."""
    layer: dict[str, str]
    """In each layer, without the attention's input projection."""
    qkv: tuple[str, ...]
    """The projections to queries, keys and values, or the one of all."""
    qkv_order: str = "separate"
    """``separate``; ``joined``: all queries, keys, values; ``by_head``: those of a head together;
    ``by_group``: the queries that share a head of keys and values, then that head's."""
    transposed: bool = False
    """Whether matrices of layers are input x output."""
    norm_offset: float = 0
    """What is added to the weights of norms."""
    experts: dict[str, str] = field(default_factory=dict)
    """For a mixture of experts: what w1, w2 and w3 are called."""
    has_head: bool = True
    """Whether a checkpoint has a head where the model takes its embedding for it; without, the
    embedding is cut as the head would be."""
    summed_bias: bool = False
    """Whether attention and MLP are summed over the ranks together: other ranks than the first have
    zeros for the bias of mlp.proj."""
    skipped_positions: int = 0
    """Rows of the position embedding that are never used."""


_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_TOP = {
    "transformer.vocab_embedding": "model.embed_tokens",
    "transformer.ln_f": "model.norm",
    "lm_head": "lm_head",
}
_LLAMA_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_layernorm": "post_attention_layernorm",
    "attention.dense": "self_attn.o_proj",
}
_LLAMA_MLP = {"mlp.fc": "mlp.gate_proj", "mlp.gate": "mlp.up_proj", "mlp.proj": "mlp.down_proj"}
_LLAMA = LayerNames("model.layers", _TOP, {**_LLAMA_NORMS, **_LLAMA_MLP}, _ATTENTION)
_GPT_TOP = {
    "transformer.vocab_embedding": "transformer.wte",
    "transformer.ln_f": "transformer.ln_f",
    "lm_head": "lm_head",
}
_GPT_LAYER = {
    "input_layernorm": "ln_1",
    "post_layernorm": "ln_2",
    "attention.dense": "attn.c_proj",
    "mlp.fc": "mlp.c_fc",
    "mlp.proj": "mlp.c_proj",
}
_GPT_POSITIONS = {**_GPT_TOP, "transformer.position_embedding": "transformer.wpe"}
_DENSE_MLP = {"mlp.fc": "mlp.dense_h_to_4h", "mlp.proj": "mlp.dense_4h_to_h"}

NAMES: dict[str, LayerNames] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "mixtral": LayerNames(
        "model.layers",
        _TOP,
        {**_LLAMA_NORMS, "mlp.router": "block_sparse_moe.gate"},
        _ATTENTION,
        experts={name: f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w2", "w3")},
    ),
    "gemma": LayerNames(
        "model.layers",
        _TOP,
        {**_LLAMA_NORMS, **_LLAMA_MLP},
        _ATTENTION,
        norm_offset=1,
        has_head=False,
    ),
    "phi": LayerNames(
        "model.layers",
        {**_TOP, "transformer.ln_f": "model.final_layernorm"},
        {
            "input_layernorm": "input_layernorm",
            "attention.dense": "self_attn.dense",
            "mlp.fc": "mlp.fc1",
            "mlp.proj": "mlp.fc2",
        },
        _ATTENTION,
    ),
    "starcoder2": LayerNames(
        "model.layers",
        _TOP,
        {**_LLAMA_NORMS, "mlp.fc": "mlp.c_fc", "mlp.proj": "mlp.c_proj"},
        _ATTENTION,
    ),
    "gpt2": LayerNames(
        "transformer.h",
        _GPT_POSITIONS,
        _GPT_LAYER,
        ("attn.c_attn",),
        qkv_order="joined",
        transposed=True,
    ),
    "starcoder": LayerNames(
        "transformer.h", _GPT_POSITIONS, _GPT_LAYER, ("attn.c_attn",), qkv_order="joined"
    ),
    "gptj": LayerNames(
        "transformer.h",
        _GPT_TOP,
        {
            "input_layernorm": "ln_1",
            "attention.dense": "attn.out_proj",
            "mlp.fc": "mlp.fc_in",
            "mlp.proj": "mlp.fc_out",
        },
        ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        summed_bias=True,
    ),
    "gptneox": LayerNames(
        "gpt_neox.layers",
        {
            "transformer.vocab_embedding": "gpt_neox.embed_in",
            "transformer.ln_f": "gpt_neox.final_layer_norm",
            "lm_head": "embed_out",
        },
        {
            "input_layernorm": "input_layernorm",
            "post_attention_layernorm": "post_attention_layernorm",
            "attention.dense": "attention.dense",
            **_DENSE_MLP,
        },
        ("attention.query_key_value",),
        qkv_order="by_head",
    ),
    "falcon": LayerNames(
        "transformer.h",
        {**_GPT_TOP, "transformer.vocab_embedding": "transformer.word_embeddings"},
        {
            "input_layernorm": "ln_attn",
            "mlp_layernorm": "ln_mlp",
            "attention.dense": "self_attention.dense",
            **_DENSE_MLP,
        },
        ("self_attention.query_key_value",),
        qkv_order="by_group",
    ),
    "bloom": LayerNames(
        "transformer.h",
        {
            **_GPT_TOP,
            "transformer.vocab_embedding": "transformer.word_embeddings",
            "transformer.ln_embed": "transformer.word_embeddings_layernorm",
        },
        {
            "input_layernorm": "input_layernorm",
            "post_layernorm": "post_attention_layernorm",
            "attention.dense": "self_attention.dense",
            **_DENSE_MLP,
        },
        ("self_attention.query_key_value",),
        qkv_order="by_head",
    ),
    "opt": LayerNames(
        "model.decoder.layers",
        {
            "transformer.vocab_embedding": "model.decoder.embed_tokens",
            "transformer.position_embedding": "model.decoder.embed_positions",
            "transformer.ln_f": "model.decoder.final_layer_norm",
            "lm_head": "lm_head",
        },
        {
            "input_layernorm": "self_attn_layer_norm",
            "post_layernorm": "final_layer_norm",
            "attention.dense": "self_attn.out_proj",
            "mlp.fc": "fc1",
            "mlp.proj": "fc2",
        },
        _ATTENTION,
        skipped_positions=2,
    ),
}
"""By family, as in `random_models`."""
