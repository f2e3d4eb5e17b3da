"""Names and types of the arguments of TensorRT-LLM's LLM API, as two of its versions have them.

``llm_args_*.json`` were written by hand from tensorrt_llm/llmapi/llm_args.py; their ``source`` says
from which, and how much of it was read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from cog_triton.engines.vllm.argument_types import convert
from cog_triton.errors import nearest

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
