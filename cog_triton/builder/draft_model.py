"""Draft model of a build: checked against the target before any step, and packed beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cog_triton.artifact import engine_config, engine_manifest
from cog_triton.artifact.engine_config import CONFIG_NAME, EngineConfig
from cog_triton.artifact.engine_manifest import DRAFT_DIRECTORY, DraftEntry
from cog_triton.builder.model_notes import json_object
from cog_triton.engines.tensorrt_llm.engine_directory import Engine
from cog_triton.engines.tensorrt_llm.releases import ReleaseContract
from cog_triton.errors import BuildConfigInvalid, EngineCorrupt, EngineIncompatible

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")


@dataclass(frozen=True)
class BuiltDraft:
    """A draft engine in `directory`, for engine.tar."""

    directory: Path
    entry: DraftEntry

    def members(self) -> dict[str, Path | bytes]:
        """Its files, by their names in the tar; its tokenizer is the target's."""
        files = engine_manifest.files_of(self.directory)
        return {
            f"{DRAFT_DIRECTORY}/{name}": path
            for name, path in files.items()
            if name == CONFIG_NAME or name.endswith(".engine")
        }


def check_tokenizers(target: Path, draft: Path) -> None:
    """Check that two models' directories have one vocabulary: a draft's token ids are proposed.

    Raises:
        EngineIncompatible: they differ; names the file, and the first token that does.
    """
    for difference in _differences(target, draft):
        raise EngineIncompatible(
            f"draft: {difference}: a draft must have the tokenizer of its target"
        )


def _differences(target: Path, draft: Path) -> Iterator[str]:
    name = _TOKENIZERS[0]
    if (target / name).is_file() and (draft / name).is_file():
        ours, theirs = _vocabulary(target / name), _vocabulary(draft / name)
        for token in sorted(ours.keys() | theirs.keys()):
            if ours.get(token) != theirs.get(token):
                yield (
                    f"{name}: token {token[:40]!r} is {theirs.get(token)} there and"
                    f" {ours.get(token)} here"
                )
        return
    held = [[(root / each).is_file() for each in _TOKENIZERS] for root in (target, draft)]
    for place, each in enumerate(_TOKENIZERS):
        if held[0][place] != held[1][place]:
            yield f"{each}: is in one of the two models alone"
        elif held[0][place] and (target / each).read_bytes() != (draft / each).read_bytes():
            yield f"{each}: differs"


def _vocabulary(path: Path) -> dict[str, Any]:
    """Token ids by token, those that were added included."""
    value = json_object(path)
    model = value.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # Unigram: tokens with their scores
        vocabulary = {str(item[0]): number for number, item in enumerate(vocabulary)}
    added = {
        str(each.get("content")): each.get("id")
        for each in value.get("added_tokens") or []
        if isinstance(each, dict)
    }
    return {**(vocabulary if isinstance(vocabulary, dict) else {}), **added}


def check_built(draft: BuiltDraft, target: EngineConfig) -> None:
    """Check a draft engine against the one that it proposes to.

    Raises:
        BuildConfigInvalid: names the limit or option that does not fit.
        EngineCorrupt: the draft's config.json cannot be read.
    """
    path = draft.directory / CONFIG_NAME
    try:
        built = engine_config.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise EngineCorrupt(f"{path}: cannot be read: {error.strerror}") from error
    for prefix, each in (("", target), ("draft.", built)):
        engine = Engine(draft.directory, each, ReleaseContract.of(each.version))
        if not engine.paged_context:
            raise BuildConfigInvalid(
                f"{prefix}build.args: each call of a draft and its target begins with the text so"
                " far, which their KV caches must keep: build both with a paged KV cache and"
                " use_paged_context_fmha enable"
            )
    if built.build_config.seq_len < target.build_config.seq_len:
        raise BuildConfigInvalid(
            f"draft: max_seq_len {built.build_config.seq_len}: must not be less than the target's,"
            f" {target.build_config.seq_len}"
        )
    if built.version != target.version:
        raise BuildConfigInvalid(
            f"draft: was built by TensorRT-LLM {built.version}, the target by {target.version}"
        )
