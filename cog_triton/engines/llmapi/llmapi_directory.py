"""LLM API engine directory: ``llmapi.yaml``, and the model and limits that it names.

Names and types of its arguments are as two versions of TensorRT-LLM have them: ``llm_args_*.json``
were written by hand from tensorrt_llm/llmapi/llm_args.py; their ``source`` says from which, and how
much of it was read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from cog_triton.engines import hugging_face
from cog_triton.engines.vllm.argument_types import convert
from cog_triton.errors import EngineCorrupt, InvalidPredictorConfig, UnexpectedEngineArg, nearest

Record = Mapping[str, Any]
ARGUMENTS = "llm_args"


@cache
def recorded() -> tuple[Record, ...]:
    """The recorded versions, oldest first."""
    files = sorted(Path(__file__).parent.glob("llm_args_*.json"))
    return tuple(json.loads(path.read_text("utf-8")) for path in files)


def version_of(record: Record) -> str:
    """The version of TensorRT-LLM that a record is of."""
    return str(record["source"]["version"])


def problems(arguments: Mapping[str, Any], record: Record) -> Iterator[str]:
    """What `record` does not take of `arguments`: the name, the value and the rule, a line each.

    Sections that are recorded, as ``kv_cache_config``, are looked into.
    """
    yield from _problems(arguments, record, ARGUMENTS, "")


def _problems(given: Mapping[str, Any], record: Record, section: str, at: str) -> Iterator[str]:
    known: Mapping[str, list[str]] = record[section]
    for name, value in given.items():
        if name not in known:
            yield (
                f"{at}{name}: TensorRT-LLM {version_of(record)} has no such argument"
                f"{nearest(name, list(known))}"
            )
            continue
        try:
            convert(value, known[name])
        except ValueError as error:
            yield f"{at}{name}={value!r}: {error} (TensorRT-LLM {version_of(record)})"
        else:
            if name in record and isinstance(value, Mapping):
                yield from _problems(value, record, name, f"{at}{name}.")


CONFIG_FILE = "llmapi.yaml"
# tensorrt_llm/llmapi/llm_args.py, from 1.2 on.
_MAX_BATCH_SIZE, _MAX_NUM_TOKENS = 2048, 8192


@dataclass(frozen=True, slots=True)
class LLMAPIModel:
    """Resolved model of the LLM API; `arguments` are all that its LLM gets; lengths in tokens."""

    arguments: Mapping[str, Any]
    tokenizer_dir: Path
    max_seq_len: int
    max_input_len: int
    end_ids: frozenset[int]

    @property
    def max_batch_size(self) -> int:
        """Sequences that run at once."""
        return int(self.arguments.get("max_batch_size") or _MAX_BATCH_SIZE)

    @property
    def guides(self) -> bool:
        """Whether output can be kept to a schema: the engine compiles no grammars unasked."""
        return self.arguments.get("guided_decoding_backend") is not None


def read_model(directory: Path) -> LLMAPIModel:
    """Read ``llmapi.yaml`` and the configuration of the model that it names.

    ``model`` is as in vLLM's model.json: a path, absolute or from `directory`, or a hub id, and
    may be left out beside a ``config.json``. Raises E1201 and E1202 for what no recorded version
    takes, E1304 for a model that cannot be had, E1306 for a file that is missing or broken.
    """
    where = directory / CONFIG_FILE
    arguments = _read(where)
    named = arguments.get("model") or ("." if (directory / "config.json").is_file() else None)
    if named is None:
        raise InvalidPredictorConfig(
            f"{where}: model: missing, and there is no config.json beside; name a directory of"
            " Hugging Face weights or a hub id"
        )
    model = hugging_face.local_model(where, str(named))
    files = model or hugging_face.from_hub(where, "model", str(named), arguments.get("revision"))
    arguments["model"] = str(model or named)
    length = arguments.get("max_seq_len") or hugging_face.derived_length(files)
    arguments["max_seq_len"] = length  # the LLM API must use the same
    longest = min(length - 1, arguments.get("max_input_len") or length)
    if not arguments.get("enable_chunked_prefill"):  # a prompt is prefilled in one step
        longest = min(longest, arguments.get("max_num_tokens") or _MAX_NUM_TOKENS)
    if longest < 1:
        raise InvalidPredictorConfig(f"{where}: max_seq_len={length}: must be at least 2")
    return LLMAPIModel(arguments, files, length, longest, hugging_face.end_ids(files))


def _read(path: Path) -> dict[str, Any]:
    """Arguments by name, as at least one of the recorded versions takes each."""
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise EngineCorrupt(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise EngineCorrupt(f"{path}: must be a YAML mapping of arguments by name")
    for name, value in content.items():
        of_versions = [list(problems({name: value}, record)) for record in recorded()]
        if all(of_versions):
            known = any(name in record[ARGUMENTS] for record in recorded())
            error_type = InvalidPredictorConfig if known else UnexpectedEngineArg
            raise error_type(f"{path}: {of_versions[0][0]}")
    return content
