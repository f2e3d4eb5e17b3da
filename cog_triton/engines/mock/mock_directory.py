"""Engine directory of the mock: generated without a build, with identical content every time.

A script of answers (MOCK_ANSWERS), where there is one, is part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cog_triton import __version__
from cog_triton.errors import EngineCorrupt, InvalidArgument

MODEL_FILE = "mock.json"
_MAX_SEQ_LEN = 131_072
_MAX_BATCH_SIZE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class MockModel:
    """Content of ``mock.json``: the engine repeats `output_ids` without end.

    With `answers`, pairs of a text and token ids, a prompt is answered by the ids whose text comes
    last in it; `pieces` are the tokens, spelled as those texts are.
    """

    output_ids: list[int]
    eos_ids: list[int]
    vocab_size: int
    max_seq_len: int
    answers: list[tuple[str, list[int]]] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    def output_for(self, prompt: Sequence[int]) -> list[int]:
        """The answer to `prompt` of those scripted; else the passage."""
        if not self.answers:
            return self.output_ids
        text = "".join(self.pieces[token] for token in prompt)
        places = [(text.rfind(after), len(after)) for after, _ in self.answers]
        last = max(range(len(places)), key=places.__getitem__)
        return self.answers[last][1] if places[last][0] >= 0 else self.output_ids


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
            answers=[(after, ids) for after, ids in raw.get("answers", [])],
            pieces=raw.get("pieces", []),
        )
        if any(type(value) is not int for value in (model.vocab_size, model.max_seq_len)):
            raise ValueError("vocab_size and max_seq_len must be whole numbers")
        ids = [*model.output_ids, *model.eos_ids, *chain(*(ids for _, ids in model.answers))]
        if any(type(token) is not int or not 0 <= token < model.vocab_size for token in ids):
            raise ValueError(f"its ids must be from 0 to {model.vocab_size - 1}")
        if not model.output_ids:
            raise ValueError("output_ids is empty")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineCorrupt(f"{path}: not a mock engine: {error!r}") from error
    return model


def make_engine(engines: Path, script: Path | None = None) -> Path:
    """Make the engine directory below `engines` unless it exists; returns its path.

    `script` is a file of answers; raises E1005 if it is none.
    """
    files = _files([] if script is None else _answers(script))
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


def _answers(script: Path) -> list[tuple[str, str]]:
    """Pairs of what a prompt has last, and its answer; raises E1005."""
    rule = "must be a list of objects with the texts `after` and `say`"
    try:
        raw = json.loads(script.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"MOCK_ANSWERS={str(script)!r}: {rule}, as JSON: {error}") from error
    if not isinstance(raw, list):
        raise InvalidArgument(f"MOCK_ANSWERS={str(script)!r}: {rule}")
    for each in raw:
        texts = isinstance(each, dict) and each.keys() == {"after", "say"}
        if not texts or not all(isinstance(text, str) and text for text in each.values()):
            raise InvalidArgument(f"MOCK_ANSWERS={str(script)!r}: {str(each)[:80]}: {rule}")
    return [(each["after"], each["say"]) for each in raw]


def _files(script: list[tuple[str, str]]) -> dict[str, str]:
    # Late: Triton's stub reads the directory without the tokenizers library.
    from cog_triton.artifact import engine_manifest
    from cog_triton.engines.mock import word_tokenizer

    made = word_tokenizer.make()
    model: dict[str, Any] = {
        "output_ids": made.encode(word_tokenizer.PASSAGE, add_special_tokens=False).ids,
        "eos_ids": [made.token_to_id(word_tokenizer.END)],
        "vocab_size": made.get_vocab_size(),
        "max_seq_len": _MAX_SEQ_LEN,
    }
    if script:
        end = model["eos_ids"]
        model["pieces"] = word_tokenizer.pieces(made)
        model["answers"] = [
            (word_tokenizer.spelled(after), made.encode(say, add_special_tokens=False).ids + end)
            for after, say in script
        ]
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
