"""GGUF sources: rebuilt tokenizers, and metadata that must not be ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openvino_reference import TinyModel, tiny_tokenizer
from test_examples_openvino import gguf_of, refused, run_script
from tokenizers import Tokenizer

from cog_triton.build_scripts.openvino import _from_gguf, _gguf_file, _tokenizer
from cog_triton.build_scripts.openvino._gguf_file import Field

V = gguf.GGUFValueType
TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \n\t'sdmLL09é\u0301"))
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def bytes_after(first: dict[str, Any] | None, use_regex: bool) -> dict[str, Any]:
    last = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}
    last["trim_offsets"] = False
    return {"type": "Sequence", "pretokenizers": [first, last]} if first else last


def split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


# The pre-tokenizers of the published tokenizer.json files: SmolLM2, GPT-2, Qwen2.5, Llama 3.
PUBLISHED = {
    "smollm": bytes_after({"type": "Digits", "individual_digits": True}, True),
    "gpt-2": bytes_after(None, True),
    "qwen2": bytes_after(split(SPLIT % ""), False),
    "llama-bpe": bytes_after(split(SPLIT % "{1,3}"), False),
}
PREPEND = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {
        "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
    },
}


def published(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(tiny_tokenizer().to_str())
    value["pre_tokenizer"] = PUBLISHED[name]
    if name == "qwen2":
        value["normalizer"] = {"type": "NFC"}
    if name == "llama-bpe":
        value["post_processor"] = PREPEND
        value["model"]["ignore_merges"] = True
    return value


@pytest.fixture(scope="module", params=list(PUBLISHED))
def pair(request: pytest.FixtureRequest) -> tuple[Tokenizer, Tokenizer]:
    """A published kind of tokenizer, and what comes back of it from GGUF metadata."""
    value = published(request.param)
    ids = {"eos_token_id": [2, 0], "bos_token_id": 1, "pad_token_id": None}
    fields = {f.key: f.value for f in _tokenizer.gguf_fields(value, {}, 320, ids)}
    assert fields["tokenizer.ggml.pre"] == request.param
    # Filling tokens have no bytes: leave them out, as they cannot be typed.
    return Tokenizer.from_str(json.dumps(value)), _tokenizer.rebuild(fields)


@given(text=TEXTS)
def test_rebuilt_tokenizer_gives_the_same_ids(pair: tuple[Tokenizer, Tokenizer], text: str) -> None:
    original, rebuilt = pair
    for value in (text, f"<|im_start|>{text}<|im_end|>"):
        ids = original.encode(value).ids
        assert rebuilt.encode(value).ids == ids
        assert rebuilt.decode(ids) == original.decode(ids)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return gguf_of(TinyModel.make("LlamaForCausalLM").save(tmp_path / "hf"))


def field(key: str, value: Any, kind: Any = V.UINT32) -> dict[str, Any]:
    return {"change": Field(key, value, kind)}


def with_fields(
    path: Path, change: Field | None = None, drop: str = "", architecture: str = "llama"
) -> Path:
    """A copy of a GGUF with other metadata."""
    fields, tensors = _gguf_file.read(path)
    kept = [f for f in fields if f.key not in (drop, change and change.key)]
    copy = path.with_name("copy.gguf")
    changed = [*kept, *filter(None, [change])]
    _gguf_file.write(copy, architecture, changed, [(each, each.type) for each in tensors])
    return copy


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (field("llama.expert_count", 8), "llama.expert_count (8)"),
        (field("llama.attention.sliding_window", 64), "sliding_window (64)"),
        (field("llama.logit_scale", 0.5, V.FLOAT32), "llama.logit_scale (0.5)"),
        (field("llama.rope.dimension_count", 16), "rope.dimension_count 16 is not 32"),
        (field("llama.block_count", 0), "llama.block_count 0 must be a whole number > 0"),
        (field("llama.rope.scaling.type", "yarn", V.STRING), "RoPE scaling 'yarn'"),
        (field("tokenizer.ggml.pre", "deepseek-llm", V.STRING), "'deepseek-llm' cannot be rebuilt"),
        (field("tokenizer.ggml.model", "llama", V.STRING), "tokenizer model 'llama'"),
        (field("split.count", 2, V.UINT16), "split GGUF"),
        ({"drop": "tokenizer.ggml.eos_token_id"}, "eos_token_id"),
        ({"architecture": "gemma3"}, "'gemma3'"),
    ],
)
def test_metadata_that_cannot_be_honoured_is_refused(
    changes: dict[str, Any], says: str, checkpoint: Path
) -> None:
    copy = with_fields(checkpoint, **changes)
    args = {"model_dir": copy, "output_dir": checkpoint.parent / "out"}
    line = refused(run_script(**args))
    assert line.startswith("E1305")
    assert says in line


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no gguf at all, no gguf at all, no gguf"])
def test_files_that_are_no_gguf_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    args = {"model_dir": tmp_path / "x.gguf", "output_dir": tmp_path / "out"}
    line = refused(run_script(**args))
    assert line.startswith("E1304")
    assert "x.gguf" in line


def test_every_stop_token_of_a_gguf_is_kept(checkpoint: Path) -> None:
    copy = with_fields(checkpoint, Field("tokenizer.ggml.eot_token_id", 7, V.UINT32))
    assert _from_gguf.read(copy).model.eos == (2, 7)


def test_numbers_survive_the_round_trip(checkpoint: Path) -> None:
    model = _from_gguf.read(checkpoint).model
    assert (model.norm_epsilon, model.rope.theta, model.head_size) == (3e-5, 5000.0, 32)
