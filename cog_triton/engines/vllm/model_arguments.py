"""Engine arguments of vLLM: reads and checks ``model.json`` and ``multi_lora.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cog_triton.engines.vllm.argument_types import (
    ArgumentTypes,
    convert,
    recorded,
    types_of,
)
from cog_triton.errors import (
    CogTritonError,
    EngineCorrupt,
    InvalidPredictorConfig,
    UnexpectedEngineArg,
    nearest,
)

MODEL_FILE = "model.json"
LORA_FILE = "multi_lora.json"

# Arguments of versions before the recorded ones, and what replaces them.
REPLACED = {
    "disable_log_requests": 'leave it out: requests are logged only with "enable_log_requests"',
    "swap_space": "leave it out: a preempted request is computed again",
    "preemption_mode": "leave it out: a preempted request is computed again",
    "use_v2_block_manager": "leave it out: there is only one block manager",
    "num_scheduler_steps": 'leave it out; "async_scheduling" does what it was for',
    "multi_step_stream_outputs": "leave it out",
    "max_seq_len_to_capture": 'use "max_cudagraph_capture_size"',
    "cuda_graph_sizes": 'use "cudagraph_capture_sizes"',
    "worker_use_ray": 'use "distributed_executor_backend": "ray"',
    "engine_use_ray": "leave it out: the engine always has processes of its own",
    "disable_frontend_multiprocessing": "leave it out",
    "guided_decoding_backend": 'use "structured_outputs_config": {"backend": ...}',
    "speculative_model": 'use "speculative_config": {"model": ...}',
    "num_speculative_tokens": 'use "speculative_config": {"num_speculative_tokens": ...}',
    "rope_scaling": 'use "hf_overrides": {"rope_scaling": ...}',
    "rope_theta": 'use "hf_overrides": {"rope_theta": ...}',
    "task": 'use "runner" and "convert"',
    "device": "leave it out: the installed vLLM knows its platform",
}


def read_arguments(directory: Path, version: str | None = None) -> dict[str, Any]:
    """The engine arguments in ``model.json``, each of the type that vLLM wants.

    `version` is vLLM's; if it is not known, any recorded one may have an argument. Raises E1201
    for a name that vLLM does not have, saying what to use instead, E1202 for a value of the wrong
    type, E1306 for a file that is missing or no JSON object.
    """
    path = directory / MODEL_FILE
    versions = recorded() if version is None else (types_of(version),)
    return {
        name: _checked(path, name, value, versions) for name, value in read_object(path).items()
    }


def _checked(path: Path, name: str, value: Any, versions: Sequence[ArgumentTypes]) -> Any:
    """The argument as the first of `versions` takes it, else the first one's error."""
    errors: list[CogTritonError] = []
    for types in versions:
        try:
            return _checked_by(types, path, name, value)
        except CogTritonError as error:
            errors.append(error)
    raise errors[0]


def _checked_by(types: ArgumentTypes, path: Path, name: str, value: Any) -> Any:
    known = types.engine_args
    if name in known:
        try:
            return convert(value, known[name])
        except ValueError as error:
            at = f"{path}: {name}={value!r}"
            raise InvalidPredictorConfig(f"{at}: {error} (vLLM {types.version})") from error
    if types.exact or name in REPLACED:
        hint = f"; {REPLACED[name]}" if name in REPLACED else types.elsewhere("engine_args", name)
        raise UnexpectedEngineArg(
            f"{path}: {name}: {types.title} has no such engine argument"
            f"{hint or nearest(name, list(known))}"
        )
    return value  # vLLM checks its arguments when it is loaded


def read_loras(directory: Path) -> dict[str, str]:
    """``multi_lora.json``: where each LoRA adapter is, by name; raises E1306.

    The serve config names adapters, too, so there may be no such file.
    """
    path = directory / LORA_FILE
    loras = read_object(path) if path.exists() else {}
    for name, place in loras.items():
        if not isinstance(place, str) or not place:
            raise EngineCorrupt(f"{path}: {name}={place!r}: must be the path of an adapter")
        loras[name] = str(directory / place) if (directory / place).exists() else place
    return loras


def refuse_unknown(arguments: Mapping[str, Any], known: list[str], version: str) -> None:
    """Refuse arguments that the installed vLLM does not have; raises E1201."""
    for name in arguments:
        if name not in known:
            raise UnexpectedEngineArg(
                f"{MODEL_FILE}: {name}: vLLM {version} has no such engine argument"
                f"{nearest(name, known)}"
            )


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; raises E1306."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise EngineCorrupt(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise EngineCorrupt(f"{path}: must be a JSON object")
    return content
