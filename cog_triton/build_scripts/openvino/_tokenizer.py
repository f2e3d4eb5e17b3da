"""Byte-level BPE tokenizers: conversion between tokenizer.json and GGUF metadata."""

from __future__ import annotations

import json
from typing import Any

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from cog_triton.build_scripts.openvino._gguf_file import Field
from cog_triton.errors import EngineIncompatible, ModelUnavailable

_V = gguf.GGUFValueType
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
# GGUF's names of pre-tokenizers -> ours; all four are reproduced exactly.
_SPLITS = {"qwen2": _QWEN2, "llama-bpe": _LLAMA3}
PRE_TOKENIZERS = ("smollm", "gpt-2", "qwen2", "llama-bpe")


def rebuild(fields: dict[str, Any]) -> Tokenizer:
    """Rebuild the Hugging Face tokenizer of a GGUF file.

    Raises:
        EngineIncompatible: no byte-level BPE, or a pre-tokenizer that cannot be reproduced.
    """
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise EngineIncompatible(
            f"tokenizer model {kind!r} with pre-tokenizer {pre!r} cannot be rebuilt from the GGUF; "
            f"byte-level BPE ('gpt2') with {', '.join(PRE_TOKENIZERS)} can"
        )
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe")
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    types = fields["tokenizer.ggml.token_type"]
    for token, kind in zip(tokens, types, strict=True):
        if kind in (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED):
            special = kind == gguf.TokenType.CONTROL
            added = AddedToken(token, special=special, normalized=False)
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])
    if fields.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        bos = fields["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{tokens[bos]} $A",
            pair=f"{tokens[bos]} $A {tokens[bos]}:1 $B:1",
            special_tokens=[(tokens[bos], bos)],
        )
    return tokenizer


def _pre_tokenizer(pre: str) -> Any:
    if pre == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "smollm":
        first: Any = pre_tokenizers.Digits(individual_digits=True)
    else:
        first = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated", invert=False)
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre == "smollm")
    return pre_tokenizers.Sequence([first, last])


def config_of(fields: dict[str, Any], max_positions: int) -> dict[str, Any]:
    """tokenizer_config.json of a GGUF file: special tokens and chat template."""
    tokens = fields["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {short: fields.get(f"tokenizer.ggml.{long}_token_id") for short, long in names.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{short}_token": None if i is None else tokens[i] for short, i in ids.items()},
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": fields.get("tokenizer.chat_template"),
    }


def gguf_fields(
    tokenizer: dict[str, Any], config: dict[str, Any], vocab_size: int, ids: dict[str, Any]
) -> list[Field]:
    """GGUF entries of a tokenizer.json (parsed) with its tokenizer_config.json.

    Raises:
        EngineIncompatible: no byte-level BPE (SentencePiece), or an id outside the vocabulary.
        ModelUnavailable: tokenizer.json is broken.
    """
    loaded = _load(tokenizer)
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [int(gguf.TokenType.UNUSED)] * vocab_size
    entries = [(t, i, gguf.TokenType.NORMAL) for t, i in tokenizer["model"]["vocab"].items()]
    for added in tokenizer.get("added_tokens", []):
        kind = gguf.TokenType.CONTROL if added.get("special") else gguf.TokenType.USER_DEFINED
        entries.append((added["content"], added["id"], kind))
    for token, index, kind in entries:
        if index >= vocab_size:
            raise EngineIncompatible(f"token {token!r} has id {index}, vocab_size is {vocab_size}")
        tokens[index], types[index] = token, int(kind)
    pairs = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    eos = ids["eos_token_id"]
    first_eos = eos[0] if isinstance(eos, list) else eos
    bos = ids["bos_token_id"]
    adds_bos = bos is not None and loaded.encode("").ids[:1] == [bos]
    adds_bos = bool(config.get("add_bos_token", adds_bos))
    fields = [
        Field("tokenizer.ggml.model", "gpt2", _V.STRING),
        Field("tokenizer.ggml.pre", _name_pre_tokenizer(loaded), _V.STRING),
        Field("tokenizer.ggml.tokens", tokens, _V.ARRAY, _V.STRING),
        Field("tokenizer.ggml.token_type", types, _V.ARRAY, _V.INT32),
        Field("tokenizer.ggml.merges", pairs, _V.ARRAY, _V.STRING),
        Field("tokenizer.ggml.eos_token_id", first_eos, _V.UINT32),
        Field("tokenizer.ggml.add_bos_token", adds_bos, _V.BOOL),
    ]
    if bos is not None:
        fields.append(Field("tokenizer.ggml.bos_token_id", bos, _V.UINT32))
    pad = first_eos if ids["pad_token_id"] is None else ids["pad_token_id"]
    fields.append(Field("tokenizer.ggml.padding_token_id", pad, _V.UINT32))
    if isinstance(config.get("chat_template"), str):
        fields.append(Field("tokenizer.chat_template", config["chat_template"], _V.STRING))
    return fields


def _load(tokenizer: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a parsed tokenizer.json, which must be byte-level BPE."""
    model, decoder = tokenizer.get("model") or {}, json.dumps(tokenizer.get("decoder"))
    pre = json.dumps(tokenizer.get("pre_tokenizer"))
    byte_level = '"ByteLevel"' in decoder and '"ByteLevel"' in pre
    if model.get("type") != "BPE" or model.get("byte_fallback") or not byte_level:
        raise EngineIncompatible(
            f"tokenizer.json is {model.get('type')!r} and not byte-level BPE (SentencePiece?): "
            "the openvino family builds byte-level BPE only"
        )
    try:
        return Tokenizer.from_str(json.dumps(tokenizer))
    except Exception as error:  # the library raises nothing more specific
        raise ModelUnavailable(f"tokenizer.json cannot be loaded: {error}") from error


def _name_pre_tokenizer(loaded: Tokenizer) -> str:
    """GGUF's name, for OpenVINO's own tokenizer; prompts are encoded by tokenizer.json itself."""
    # Offsets do not change how it splits.
    state = loaded.pre_tokenizer.__getstate__()
    state = state.replace(b'"trim_offsets":false', b'"trim_offsets":true')
    known = (name for name in PRE_TOKENIZERS if _pre_tokenizer(name).__getstate__() == state)
    return next(known, "default")
