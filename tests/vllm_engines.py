"""Small vLLM engine directories, and the environment with the double of vLLM."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

DOUBLES = Path(__file__).parent / "doubles"
EOS = 256
MAX_MODEL_LEN = 128


def tokenizer() -> Tokenizer:
    """One token for each byte, ids 0 to 255 being in byte order, and an end of sequence."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shown = {byte: chr(byte) for byte in plain}
    rest = [byte for byte in range(256) if byte not in shown]
    shown |= {byte: chr(256 + place) for place, byte in enumerate(rest)}
    assert sorted(shown.values()) == sorted(alphabet)
    made = Tokenizer(models.BPE({shown[byte]: byte for byte in range(256)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|end|>", special=True)])
    return made


def hugging_face(directory: Path, **config: Any) -> Path:
    """A model as the hub has it, but for its weights, which are an empty file."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    values = {"max_position_embeddings": MAX_MODEL_LEN, "eos_token_id": EOS, **config}
    (directory / "config.json").write_text(json.dumps(values))
    (directory / "model.safetensors").touch()
    return directory


VISION = {"architectures": ["Qwen2VLForConditionalGeneration"], "vision_config": {}}
"""What the configuration of a model that takes images has more."""


def vllm_engine(directory: Path, *, config: dict[str, Any] | None = None, **arguments: Any) -> Path:
    """A Hugging Face directory with ``model.json``; `config` is more of its configuration."""
    hugging_face(directory, **(config or {}))
    (directory / "model.json").write_text(json.dumps(arguments))
    return directory


def double_environment(journal: Path | None = None, **values: str) -> dict[str, str]:
    """Environment in which ``import vllm`` finds the double."""
    path = os.pathsep.join([str(DOUBLES), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path, **values}
    return environment | ({"VLLM_DOUBLE_JOURNAL": str(journal)} if journal else {})


def calls(journal: Path, name: str) -> list[dict[str, Any]]:
    """Calls of one name in the double's journal."""
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [call for call in map(json.loads, lines) if call["call"] == name]
