"""Engine directory of the mock: generated without a build, with identical content every time."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from cog_triton import __version__
from cog_triton.errors import EngineCorrupt

MODEL_FILE = "mock.json"
_MAX_SEQ_LEN = 131_072
_MAX_BATCH_SIZE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class MockModel:
    """Content of ``mock.json``: the engine repeats `output_ids` without end."""

    output_ids: list[int]
    eos_ids: list[int]
    vocab_size: int
    max_seq_len: int


def read_model(directory: Path) -> MockModel:
    """Parse ``mock.json`` of an engine directory; raises E1306 naming what is wrong."""
    path = directory / MODEL_FILE
    try:
        raw = json.loads(path.read_text("utf-8"))
        model = MockModel(
            output_ids=raw["output_ids"],
            eos_ids=raw["eos_ids"],
            vocab_size=raw["vocab_size"],
            max_seq_len=raw["max_seq_len"],
        )
        if any(type(value) is not int for value in (model.vocab_size, model.max_seq_len)):
            raise ValueError("vocab_size and max_seq_len must be whole numbers")
        ids = [*model.output_ids, *model.eos_ids]
        if any(type(token) is not int or not 0 <= token < model.vocab_size for token in ids):
            raise ValueError(f"its ids must be from 0 to {model.vocab_size - 1}")
        if not model.output_ids:
            raise ValueError("output_ids is empty")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineCorrupt(f"{path}: not a mock engine: {error!r}") from error
    return model


def make_engine(engines: Path) -> Path:
    """Make the engine directory below `engines` unless it exists; returns its path."""
    files = _files()
    digest = hashlib.sha256("\0".join([*files, *files.values()]).encode()).hexdigest()
    target = engines / f"mock-{digest[:16]}"
    if not target.is_dir():
        engines.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".mock-", dir=engines) as scratch:
            made = Path(scratch) / "engine"
            made.mkdir()
            for name, text in files.items():
                (made / name).write_text(text, "utf-8")
            try:
                made.rename(target)
            except OSError:
                if not target.is_dir():  # else another process made it first
                    raise
    return target


def _files() -> dict[str, str]:
    # Late: Triton's stub reads the directory without the tokenizers library.
    from cog_triton.artifact import engine_manifest
    from cog_triton.engines.mock import word_tokenizer

    made = word_tokenizer.make()
    model = {
        "output_ids": made.encode(word_tokenizer.PASSAGE, add_special_tokens=False).ids,
        "eos_ids": [made.token_to_id(word_tokenizer.END)],
        "vocab_size": made.get_vocab_size(),
        "max_seq_len": _MAX_SEQ_LEN,
    }
    files = {
        MODEL_FILE: json.dumps(model),
        "tokenizer.json": made.to_str(),
        "tokenizer_config.json": json.dumps(word_tokenizer.CONFIG, indent=2),
    }
    manifest = engine_manifest.Manifest(
        engine="mock",
        model_id="mock",
        versions={"cog_triton": __version__},
        max_input_len=_MAX_SEQ_LEN - 1,
        max_seq_len=_MAX_SEQ_LEN,
        max_batch_size=_MAX_BATCH_SIZE,
        files={
            name: engine_manifest.FileEntry(
                size=len(text.encode()), sha256=hashlib.sha256(text.encode()).hexdigest()
            )
            for name, text in files.items()
        },
    )
    return {**files, engine_manifest.MANIFEST_NAME: manifest.to_json()}
