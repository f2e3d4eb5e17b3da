"""Tensors of the models behind the door: names and types, as their configs in Triton have them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from cog_triton import errors
from cog_triton.door.message import Answer
from cog_triton.door.private_json import ask
from cog_triton.door.upstream import Upstream

_TIMEOUT_S = 5.0
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError)


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """Tensors of one model: types of its inputs by name (``BYTES``, ``INT32``), its outputs."""

    inputs: Mapping[str, str]
    outputs: frozenset[str]


class ServedModels:
    """Tensors of the models of each upstream: asked for once a model, whose config never changes.

    Only what Triton serves is kept, so that clients cannot fill it.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Upstream, dict[str, ModelTensors]] = WeakKeyDictionary()

    async def tensors(self, upstream: Upstream, port: int, model: str) -> ModelTensors | Answer:
        """Tensors of the model at the path `model`, or Triton's own answer if it serves none.

        Raises:
            TritonUnavailable: Triton does not answer.
        """
        known = self._known.setdefault(upstream, {})
        if model not in known:
            try:
                asked = ask(port, b"GET", f"{model}/config".encode())
                status, body = await asyncio.wait_for(asked, _TIMEOUT_S)
                if status != 200:
                    return Answer(status, body)
                known[model] = _tensors(body)
            except (TimeoutError, OSError, *_MALFORMED) as error:
                rule = "the server behind this port does not answer; try again"
                raise errors.TritonUnavailable(rule) from error
        return known[model]


def _tensors(config: bytes) -> ModelTensors:
    model = json.loads(config)
    return ModelTensors(
        {tensor["name"]: _datatype(tensor["data_type"]) for tensor in model.get("input", ())},
        frozenset(tensor["name"] for tensor in model.get("output", ())),
    )


def _datatype(config_type: str) -> str:
    """A type of a config as requests name it."""
    return "BYTES" if config_type == "TYPE_STRING" else config_type.removeprefix("TYPE_")
