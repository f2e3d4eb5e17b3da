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
from typing import Annotated

import msgspec

from cog_triton import __version__
from cog_triton.errors import EngineCorrupt, InvalidArgument

MODEL_FILE = "mock.json"
_MAX_SEQ_LEN = 131_072
_MAX_BATCH_SIZE = 256
_Ids = list[Annotated[int, msgspec.Meta(ge=0)]]
_Text = Annotated[str, msgspec.Meta(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MockModel:
    """Content of ``mock.json``: the engine repeats `output_ids` without end.

    With `answers`, pairs of a text and token ids, a prompt is answered by the ids whose text comes
    last in it; `pieces` are the tokens, spelled as those texts are.
    """

    output_ids: _Ids
    eos_ids: _Ids
    vocab_size: int
    max_seq_len: int
    answers: list[tuple[str, _Ids]] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    def output_for(self, prompt: Sequence[int]) -> list[int]:
        """The answer to `prompt` of those scripted; else the passage."""
        if not self.answers:
            return self.output_ids
        text = "".join(self.pieces[token] for token in prompt)
        after, ids = max(self.answers, key=lambda each: (text.rfind(each[0]), len(each[0])))
        return ids if after in text else self.output_ids


def read_model(directory: Path) -> MockModel:
    """Parse ``mock.json`` of an engine directory; raises E1306 naming what is wrong."""
    path = directory / MODEL_FILE
    try:
        model = msgspec.json.decode(path.read_bytes(), type=MockModel)
        ids = [*model.output_ids, *model.eos_ids, *chain(*(ids for _, ids in model.answers))]
        if not model.output_ids or max(ids) >= model.vocab_size:
            raise ValueError(f"it needs output_ids, from 0 to {model.vocab_size - 1} as all ids")
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise EngineCorrupt(f"{path}: not a mock engine: {error!r}") from error
    return model


def make_engine(engines: Path, script: Path | None = None) -> Path:
    """Make the engine directory below `engines` unless it exists; returns its path.

    `script` is a file of answers; raises E1005 if it is none.
    """
    files = _files([] if script is None else _answers(script))
    digest = hashlib.sha256(b"".join(files.values())).hexdigest()
    target = engines / f"mock-{digest[:16]}"
    if not target.is_dir():
        engines.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".mock-", dir=engines) as scratch:
            made = Path(scratch) / "engine"
            made.mkdir()
            for name, data in files.items():
                (made / name).write_bytes(data)
            try:
                made.rename(target)
            except OSError:
                if not target.is_dir():  # else another process made it first
                    raise
    return target


class _Answer(msgspec.Struct, forbid_unknown_fields=True):
    """Entry of a script: the text `after` which a prompt is answered by the text `say`."""

    after: _Text
    say: _Text


def _answers(script: Path) -> list[_Answer]:
    """The entries of a script; raises E1005."""
    try:
        return msgspec.json.decode(script.read_bytes(), type=list[_Answer])
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidArgument(
            f"MOCK_ANSWERS={str(script)!r}: must be a list of objects with the texts `after` and"
            f" `say`, as JSON: {error}"
        ) from error


def _files(script: list[_Answer]) -> dict[str, bytes]:
    # Late: engine processes read the directory without pydantic and the tokenizers library.
    from cog_triton.artifact.engine_manifest import MANIFEST_NAME, FileEntry, Manifest
    from cog_triton.engines.mock import word_tokenizer

    made = word_tokenizer.make()

    def ids_of(text: str) -> list[int]:
        return list(made.encode(text, add_special_tokens=False).ids)

    end, vocabulary = ids_of(word_tokenizer.END), made.get_vocab()
    model = MockModel(
        output_ids=ids_of(word_tokenizer.PASSAGE),
        eos_ids=end,
        vocab_size=len(vocabulary),
        max_seq_len=_MAX_SEQ_LEN,
        answers=[(word_tokenizer.spelled(each.after), ids_of(each.say) + end) for each in script],
        pieces=sorted(vocabulary, key=vocabulary.__getitem__) if script else [],
    )
    files = {
        MODEL_FILE: msgspec.json.encode(model),
        "tokenizer.json": made.to_str().encode(),
        "tokenizer_config.json": json.dumps(word_tokenizer.CONFIG, indent=2).encode(),
    }
    manifest = Manifest(
        engine="mock",
        model_id="mock",
        versions={"cog_triton": __version__},
        max_input_len=_MAX_SEQ_LEN - 1,
        max_seq_len=_MAX_SEQ_LEN,
        max_batch_size=_MAX_BATCH_SIZE,
        files={
            name: FileEntry(size=len(data), sha256=hashlib.sha256(data).hexdigest())
            for name, data in files.items()
        },
    )
    return {**files, MANIFEST_NAME: manifest.to_json().encode()}
