"""The CPU family's script, run as the builder runs it, on Hugging Face models and GGUF files."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openvino_reference import CHAT, TinyModel, engine_greedy, engine_logits, tiny_tokenizer
from tokenizers import Tokenizer

import cog_triton
from cog_triton.build_scripts.openvino import _from_hf, _gguf_file, _script, _tokenizer
from cog_triton.build_scripts.openvino import build as build_script
from cog_triton.build_scripts.openvino._gguf_file import Field
from cog_triton.errors import from_text

ROOT = Path(cog_triton.__file__).parent
SCRIPT = ROOT / "build_scripts" / "openvino" / "build.py"
IDS = [5, 99, 250, 17, 31, 280, 44]
Run = Callable[..., subprocess.CompletedProcess[str]]
ARCHITECTURES = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]


def run_process(**args: Any) -> subprocess.CompletedProcess[str]:
    """The script as the builder runs it."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words_of(args)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT.parent)},
        check=False,
    )


def run_script(**args: Any) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has imported already what scripts import for a second."""
    command, out, err = ["build.py", *words_of(args)], io.StringIO(), io.StringIO()
    code: Any = 0
    with patch.object(sys, "argv", command), redirect_stdout(out), redirect_stderr(err):
        try:
            _script.run(build_script.main)
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


def words_of(args: dict[str, Any]) -> list[str]:
    return [str(word) for key, value in args.items() for word in (f"--{key}", value)]


def build(
    source: Path, engine: Path, weights: str = "f16", run: Run = run_script, **limits: int
) -> Path:
    done = run(model_dir=source, output_dir=engine, weights=weights, **limits)
    assert done.returncode == 0, done.stdout + done.stderr
    return engine


def gguf_of(directory: Path, kind: str = "F16") -> Path:
    """A Hugging Face model as a GGUF file beside it."""
    found = _from_hf.read(directory)
    tensors = [(each, "F32" if len(each.shape) == 1 else kind) for each in found.tensors]
    path = directory.with_suffix(".gguf")
    _gguf_file.write(path, found.model.gguf_architecture, found.fields, tensors)
    return path


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The coded line of a script that refused, as its only output on stderr."""
    assert done.returncode == 1, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    error = from_text(done.stderr)
    assert error is not None, done.stderr
    return str(error)


def close(found: np.ndarray, wanted: np.ndarray) -> bool:
    return bool(np.abs(found - wanted).max() < 2e-3 * np.abs(wanted).max())


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    """A small Hugging Face model, of Llama's architecture."""
    return TinyModel.make("LlamaForCausalLM").save(tmp_path / "hf")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_engine_computes_what_the_architecture_says(architecture: str, tmp_path: Path) -> None:
    tied = architecture == "Qwen3ForCausalLM"
    model = TinyModel.make(architecture, tie_word_embeddings=tied)
    engine = build(model.save(tmp_path / "hf"), tmp_path / "e")
    wanted = model.logits(IDS * 20)
    assert close(engine_logits(engine, IDS * 20), wanted)
    assert engine_greedy(engine, IDS, 24) == model.greedy(IDS, 24)


@pytest.mark.parametrize(("qformat", "kind"), [("q8_0", "Q8_0"), ("q4_0", "Q4_0")])
def test_quantized_engine_computes_the_quantized_model(
    qformat: str, kind: str, tmp_path: Path
) -> None:
    model = TinyModel.make("LlamaForCausalLM")
    engine = build(model.save(tmp_path / "hf"), tmp_path / "e", qformat)
    wanted = model.quantized(kind, "Q8_0")
    assert close(engine_logits(engine, IDS * 4), wanted.logits(IDS * 4))
    assert not close(engine_logits(engine, IDS * 4), model.logits(IDS * 4))


def llama3_frequencies(theta: float, dim: int, factor: float) -> np.ndarray:
    """Llama 3.1's rule, wavelength by wavelength."""
    low, high, original = 1.0, 4.0, 64
    found = []
    for i in range(0, dim, 2):
        frequency = theta ** -(i / dim)
        wavelength = 2 * math.pi / frequency
        if wavelength > original / low:
            frequency /= factor
        elif wavelength > original / high:
            smooth = (original / wavelength - low) / (high - low)
            frequency = (1 - smooth) * frequency / factor + smooth * frequency
        found.append(frequency)
    return np.array(found)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "frequencies"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "linear"),
        ({"rope_scaling": LLAMA3}, "llama3"),
        ({"rope_parameters": {"rope_theta": 5000.0, **LLAMA3}}, "llama3"),
    ],
)
def test_rope_scaling_is_carried_over(
    config: dict[str, Any], frequencies: str, tmp_path: Path
) -> None:
    model = TinyModel.make("LlamaForCausalLM", **config)
    engine = build(model.save(tmp_path / "hf"), tmp_path / "e")
    plain = 5000.0 ** -(np.arange(0, 32, 2) / 32)
    scaled = plain / 4.0 if frequencies == "linear" else llama3_frequencies(5000.0, 32, 8.0)
    ids = (IDS * 40)[:256]
    found = engine_logits(engine, ids)
    assert close(found, model.logits(ids, scaled))
    assert not close(found, model.logits(ids, plain))
    # The same from a GGUF alone, as any GGUF of such a model comes.
    again = build(gguf_of(tmp_path / "hf"), tmp_path / "again")
    assert close(engine_logits(again, ids), model.logits(ids, scaled))


def rope(kind: str) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, "factor": 2.5}}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (rope("yarn"), "'yarn' (factor 2.5)"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 1.0}}, "disagree"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "disagree"),
        ({"rope_scaling": {**LLAMA3, "beta": 1}}, "unknown parameters ['beta']"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 9.0}}, "high_freq_factor <= low"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"sliding_window": 128}, "sliding_window 128"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_local_experts": 8}, "mixture-of-experts"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"eos_token_id": None}, "eos_token_id"),
        ({"hidden_size": 0}, "hidden_size 0 must be a whole number > 0"),
        ({"vocab_size": 999}, "token_embd.weight"),
        ({"num_hidden_layers": 3}, "blk.2."),
    ],
)
def test_settings_that_the_engine_would_ignore_are_refused(
    changes: dict[str, Any], says: str, hf: Path, tmp_path: Path
) -> None:
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | changes))
    line = refused(run_script(model_dir=hf, output_dir=tmp_path / "e"))
    assert line.startswith("E1305")
    assert says in line


def shard(header: bytes) -> Callable[[bytes], bytes]:
    return lambda _: len(header).to_bytes(8, "little") + header


def no_such_merge(text: bytes) -> bytes:
    value = json.loads(text)
    value["model"]["merges"] = [["no such", "token"]]
    return json.dumps(value).encode()


BYTE_FALLBACK = b'{"model": {"type": "BPE", "byte_fallback": true}, "decoder": {"type": "Fuse"}}'


@pytest.mark.parametrize(
    ("name", "change", "code", "says"),
    [
        ("config.json", lambda _: b"{", "E1304", "config.json: not valid JSON"),
        ("tokenizer.json", lambda _: b"[]", "E1304", "tokenizer.json: must hold a JSON object"),
        ("tokenizer.json", no_such_merge, "E1304", "tokenizer.json cannot be loaded"),
        ("tokenizer.json", lambda _: BYTE_FALLBACK, "E1305", "SentencePiece"),
        ("model*.safetensors", shard(b'{"a": {"dtype": "F32"}}'), "E1304", ".safetensors: broken"),
        ("model*.safetensors", lambda data: data[:-10], "E1304", "truncated"),
    ],
)
def test_broken_files_are_named(
    name: str, change: Callable[[bytes], bytes], code: str, says: str, hf: Path, tmp_path: Path
) -> None:
    path = next(hf.glob(name))
    path.write_bytes(change(path.read_bytes()))
    line = refused(run_script(model_dir=hf, output_dir=tmp_path / "e"))
    assert line.startswith(code)
    assert says in line


def test_engine_config_tokenizer_and_template(tmp_path: Path) -> None:
    model = TinyModel.make("LlamaForCausalLM")
    source = model.save(tmp_path / "hf")
    own = {"temperature": 0.5, "top_k": 7}
    (source / "generation_config.json").write_text(json.dumps({**own, "top_p": "x", "x": 1}))
    engine = build(source, tmp_path / "e", "q8_0", max_seq_len=100, max_batch_size=3)
    config = json.loads((engine / "config.json").read_text())
    assert config["engine"] == "openvino"
    assert config["version"] == cog_triton.__version__
    assert config["build_config"] == {
        "max_input_len": 99,
        "max_seq_len": 100,
        "max_batch_size": 3,
        "max_beam_width": 1,
    }
    described = config["pretrained_config"]
    assert described["eos_token_id"] == [2, 0]
    found = json.loads((engine / "generation_config.json").read_text())
    assert own.items() <= found.items()
    assert found.keys().isdisjoint({"x", "top_p"})
    assert described["quantization"]["quant_algo"] == "Q8_0"
    assert described["norm_epsilon"] == 3e-5
    assert described["rotary_base"] == 5000.0
    assert (engine / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert json.loads((engine / "tokenizer_config.json").read_text())["chat_template"] == CHAT


def test_building_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    source = TinyModel.make("Qwen3ForCausalLM").save(tmp_path / "hf")
    one, two = (build(source, tmp_path / name, "q8_0", run_process) for name in ("one", "two"))
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in two.iterdir())
    assert [n for n in names if (one / n).read_bytes() != (two / n).read_bytes()] == []


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"max_seq_len": 513}, "--max_seq_len 513 must be from 2 to 512"),
        ({"max_seq_len": 10, "max_input_len": 10}, "--max_input_len 10 must be from 1 to 9"),
        ({"max_batch_size": 0}, "--max_batch_size 0"),
    ],
)
def test_limits_are_bounded_by_the_model(
    limits: dict[str, int], says: str, hf: Path, tmp_path: Path
) -> None:
    line = refused(run_script(model_dir=hf, output_dir=tmp_path / "e", **limits))
    assert line.startswith("E1005")
    assert says in line


def test_stored_weights_are_built_as_they_are_or_refused(hf: Path, tmp_path: Path) -> None:
    args = {"model_dir": hf, "output_dir": tmp_path / "e", "weights": "stored"}
    assert "cannot be built as it is: take --weights q8_0" in refused(run_script(**args))
    half = gguf_of(hf)
    stored = build(half, tmp_path / "stored", "stored")
    again = build(half, tmp_path / "f16", "f16")
    name = "openvino_model.bin"
    assert (stored / name).read_bytes() == (again / name).read_bytes()


def test_tokenizer_survives_the_round_trip_through_gguf(hf: Path, tmp_path: Path) -> None:
    engine = build(gguf_of(hf), tmp_path / "e")
    one = Tokenizer.from_file(str(hf / "tokenizer.json"))
    two = Tokenizer.from_file(str(engine / "tokenizer.json"))
    for text in ("the quick 12 dogs", "héllo ✓ 🦊\n\n  x", "<|im_start|>pack<|im_end|>"):
        assert one.encode(text).ids == two.encode(text).ids
        assert two.decode(two.encode(text).ids, skip_special_tokens=False) == text


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
        (field("llama.rope.dimension_count", 16), "rope.dimension_count 16 is not 32"),
        (field("llama.rope.scaling.type", "yarn", V.STRING), "RoPE scaling 'yarn'"),
        (field("tokenizer.ggml.pre", "deepseek-llm", V.STRING), "'deepseek-llm' cannot be rebuilt"),
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
