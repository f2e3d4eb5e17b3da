"""The file of a migration's target, and its check against the target's recorded arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from cog_triton.builder.migration.migrated_config import Migration
from cog_triton.builder.migration.rule_table import Target
from cog_triton.engines.llmapi import llm_args
from cog_triton.engines.vllm import argument_types
from cog_triton.errors import InvalidArgument, InvalidPredictorConfig

FILES: Mapping[Target, str] = {"vllm": "model.json", "llmapi": "llmapi.yaml"}
"""What an engine directory of the target has, by its name there."""
_SUFFIXES: Mapping[Target, tuple[str, ...]] = {
    "vllm": (".json",),
    "llmapi": (".yaml", ".yml"),
}
_HEAD = """\
# Arguments of TensorRT-LLM's LLM API, which trtllm-serve takes by --extra_llm_api_options.
# Written by cog-triton migrate.
"""


def text_of(found: Migration) -> str:
    """The file's text.

    Raises:
        InvalidPredictorConfig: a recorded version of the target does not take an argument, as a
            value of the build config has a type that TensorRT-LLM's own script would refuse, too.
    """
    if wrong := list(problems(found.target, found.arguments)):
        raise InvalidPredictorConfig("\n".join(wrong))
    if found.target == "vllm":
        return json.dumps(found.arguments, indent=2) + "\n"
    head = (
        "# For TensorRT-LLM's LLM API: a directory with it is an engine of cog-triton serve, and\n"
    )
    head += "# trtllm-serve takes it by --extra_llm_api_options. Written by cog-triton migrate.\n"
    return head + yaml.safe_dump(found.arguments, sort_keys=False)


def problems(target: Target, arguments: Mapping[str, Any]) -> Iterator[str]:
    """What the recorded versions of `target` do not take of `arguments`, a line each."""
    if target == "llmapi":
        for record in llm_args.recorded():
            yield from llm_args.problems(arguments, record)
        return
    for types in argument_types.recorded():
        for name, value in arguments.items():
            try:
                argument_types.convert(value, types.engine_args[name])
            except KeyError:
                yield f"{name}: {types.title} has no such engine argument"
            except ValueError as error:
                yield f"{name}={value!r}: {error} (vLLM {types.version})"


def path_of(target: Target, output: Path) -> Path:
    """The file that ``-o OUTPUT`` names: `output` itself by its suffix, else one in a directory.

    Raises:
        InvalidArgument: `output` is a file of another kind.
    """
    if output.suffix in _SUFFIXES[target]:
        return output
    if output.is_file() or output.suffix in (".json", ".yaml", ".yml", ".tar"):
        raise InvalidArgument(
            f"--output {output}: must be a directory, or end in {' or '.join(_SUFFIXES[target])}"
        )
    return output / FILES[target]
