"""Bodies for Triton's HTTP API: a list of what is allowed, by name and type, and written anew.

Triton 24.10 takes more than it survives, such as `classification` of a tensor of text, or a shape
of 2**62 values. Source of names and types: http_server.cc of Triton.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from cog_triton.door.json_body import JSONLimits, parsed, written
from cog_triton.errors import InvalidArgument, nearest
from cog_triton.system.printable import printable

_SHOWN = 80
_MOST_TEXT = 64 << 10
_MOST_ID = 1024
_MOST_DIMENSIONS = 16
_MOST_PARAMETERS = 64
_MOST_ELEMENTS = 2**31 - 1
_BITS = (8, 16, 32, 64)
_WHOLE = {f"INT{bits}": (-(1 << bits - 1), (1 << bits - 1) - 1) for bits in _BITS}
_WHOLE |= {f"UINT{bits}": (0, (1 << bits) - 1) for bits in _BITS}
_FLOATS = {"FP32": 3.4028235677973366e38, "FP64": sys.float_info.max}
_TYPES: Mapping[str, frozenset[type]] = {
    "BOOL": frozenset({bool}),
    "BYTES": frozenset({str}),
    **dict.fromkeys(_WHOLE, frozenset({int})),
    **dict.fromkeys(_FLOATS, frozenset({int, float})),
}
"""Types of JSON for those of tensors; others, such as FP16, come as binary ones."""
_BOUNDS = {**_WHOLE, **{name: (-most, most) for name, most in _FLOATS.items()}}
_BYTES_OF = {"BOOL": 1, "BF16": 2, "FP16": 2, "FP32": 4, "FP64": 8}
_BYTES_OF |= {f"{sign}INT{bits}": bits // 8 for sign in ("", "U") for bits in _BITS}
_LENGTH_BYTES = 4  # before each element of BYTES

# Parameters of a request that Triton itself reads, and their greatest value; of BOOL, 1.
_TRITONS = {
    "binary_data_output": 1,
    "priority": 2**32 - 1,
    "sequence_end": 1,
    "sequence_id": 2**64 - 1,
    "sequence_start": 1,
    "timeout": 2**63 - 1,
}
_FLAGS = ("binary_data_output", "sequence_end", "sequence_start")
# All others are the model's, for which Triton keeps them: a name and a plain value.
_OF_MODEL = re.compile(
    r"(?!triton_|shared_memory_|classification|binary_data)[A-Za-z_][\w.-]{0,63}", re.ASCII
)


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """Tensors of one model: types of its inputs by name (``BYTES``, ``INT32``), its outputs."""

    inputs: Mapping[str, str]
    outputs: frozenset[str]


def rewritten_index(body: bytes, limits: JSONLimits) -> bytes:
    """A request for the list of models."""
    value = parsed(body or b"{}", limits)
    _require_known("repository/index", value, ("ready",))
    if type(value.get("ready", True)) is not bool:
        raise InvalidArgument("ready: must be true or false")
    return written(value)


def rewritten_generation(body: bytes, limits: JSONLimits, model: ModelTensors) -> bytes:
    """A request to generate: inputs of the `model` by name, and parameters."""
    value = parsed(body or b"{}", limits)
    _drop_null(value, "id", "parameters")
    _check_id(value)
    nested = value.get("parameters", {})
    if not isinstance(nested, dict):
        raise InvalidArgument("parameters: must be an object")
    count = 0
    # Triton reads both levels, so that neither hides what the other has by the same name.
    for values, known in ((value, {"id", "parameters"}), (nested, set())):
        for name, given in values.items():
            if (datatype := model.inputs.get(name)) is not None:
                elements = _checked_elements(name, datatype, given)
                values[name] = elements if isinstance(given, list) else given
        known |= model.inputs.keys()
        others = {name: given for name, given in values.items() if name not in known}
        _check_parameters(others, count)
        count += len(others)
    return written(value)


def rewritten_inference(
    body: bytes, header_length: bytes, limits: JSONLimits, model: ModelTensors
) -> tuple[bytes, int | None]:
    """An inference request, its tensors in JSON or, binary, behind it; and its JSON's length.

    `header_length` is Inference-Header-Content-Length as it was sent, empty without binary tensors.
    """
    if header_length and not (
        header_length.isdigit() and len(header_length) < 12 and int(header_length) <= len(body)
    ):
        raise InvalidArgument(
            f"Inference-Header-Content-Length={header_length[:20].decode('latin-1')!r}: must be"
            f" from 0 to the body's {len(body)} bytes"
        )
    size = int(header_length) if header_length else len(body)
    value = parsed(body[:size], limits)
    _require_known("request", value, ("id", "inputs", "outputs", "parameters"))
    _drop_null(value, "id", "outputs", "parameters")
    _check_id(value)
    _check_parameters(value.get("parameters", {}))
    binary = sum(_checked_input(tensor, model) for tensor in _named_tensors("inputs", value))
    for tensor in _named_tensors("outputs", value):
        _check_output(tensor, model)
    if binary != len(body) - size:
        raise InvalidArgument(
            f"inputs: binary_data_size adds up to {binary} bytes, {len(body) - size} were sent"
        )
    head = written(value)
    return head + body[size:], len(head) if header_length else None


def _named_tensors(kind: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    tensors = request.get(kind, [])
    if not isinstance(tensors, list) or not all(isinstance(one, dict) for one in tensors):
        raise InvalidArgument(f"{kind}: must be a list of objects")
    names = [tensor.get("name") for tensor in tensors]
    if not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise InvalidArgument(f"{kind}: each must have a name of its own")
    return tensors


def _checked_input(tensor: dict[str, Any], model: ModelTensors) -> int:
    """Bytes that follow of an input, if it is binary; its data is made one flat list."""
    name = tensor["name"]
    _require_known("inputs", {name: None}, model.inputs)
    _require_known(name, tensor, ("data", "datatype", "name", "parameters", "shape"))
    datatype = model.inputs[name]
    if tensor.get("datatype") != datatype:
        given = _shown(tensor.get("datatype"))
        raise InvalidArgument(f"{name}: datatype={given}: must be {datatype!r}")
    count = _elements(name, tensor.get("shape"))
    _drop_null(tensor, "parameters")
    parameters = tensor.get("parameters", {})
    _require_known(f"parameters of {name}", parameters, ("binary_data_size",))
    if not parameters:
        tensor["data"] = _checked_elements(name, datatype, tensor.get("data"))
        if len(tensor["data"]) != count:
            found = len(tensor["data"])
            raise InvalidArgument(f"{name}: shape has {count} elements, data has {found}")
        return 0
    if "data" in tensor:
        raise InvalidArgument(f"{name}: data: must not be there beside binary_data_size")
    size = parameters["binary_data_size"]
    least = count * _BYTES_OF.get(datatype, _LENGTH_BYTES)
    if type(size) is not int or size < least or (datatype in _BYTES_OF and size > least):
        rule = f"must be {least}" + ("" if datatype in _BYTES_OF else " or more")
        raise InvalidArgument(f"{name}: binary_data_size={_shown(size)}: {rule}, as of its shape")
    return int(size)


def _check_output(tensor: dict[str, Any], model: ModelTensors) -> None:
    name = tensor["name"]
    _require_known("outputs", {name: None}, model.outputs)
    _require_known(name, tensor, ("name", "parameters"))
    _drop_null(tensor, "parameters")
    parameters = tensor.get("parameters", {})
    _require_known(f"parameters of {name}", parameters, ("binary_data",))
    if type(parameters.get("binary_data", True)) is not bool:
        raise InvalidArgument(f"{name}: binary_data: must be true or false")


def _elements(name: str, shape: Any) -> int:
    """Elements of a tensor of that `shape`."""
    dimensions = shape if isinstance(shape, list) and len(shape) <= _MOST_DIMENSIONS else []
    whole = bool(dimensions) and all(type(n) is int and n >= 0 for n in dimensions)
    if not whole or math.prod(n or 1 for n in dimensions) > _MOST_ELEMENTS:
        rule = f"1 to {_MOST_DIMENSIONS} whole numbers, with a product of {_MOST_ELEMENTS} at most"
        raise InvalidArgument(f"{name}: shape={_shown(shape)}: must be {rule}")
    return math.prod(dimensions)


def _checked_elements(name: str, datatype: str, data: Any) -> list[Any]:
    """Elements of a tensor, in order; of lists of lists, those of the innermost."""
    if datatype not in _TYPES:
        raise InvalidArgument(f"{name}: {datatype} must be a binary tensor of infer")
    elements = data if isinstance(data, list) else [data]
    found = {*map(type, elements)}
    while list in found and len(found) == 1:  # as often as the body may be nested
        elements = list(chain.from_iterable(elements))
        found = {*map(type, elements)}
    if not found <= _TYPES[datatype]:
        wrong = next(item for item in elements if type(item) not in _TYPES[datatype])
        raise InvalidArgument(f"{name}={_shown(wrong)}: must be {datatype}, in lists of one depth")
    if elements and datatype in _BOUNDS:
        low, high = _BOUNDS[datatype]
        wrong = least if (least := min(elements)) < low else max(elements)
        if not low <= wrong <= high:
            raise InvalidArgument(f"{name}={_shown(wrong)}: beyond {datatype}")
    return elements


def _check_id(request: dict[str, Any]) -> None:
    given = request.get("id", "")
    if not isinstance(given, str) or len(given) > _MOST_ID:
        rule = f"must be text of {_MOST_ID} characters at most"
        raise InvalidArgument(f"id={_shown(given)}: {rule}")


def _drop_null(values: dict[str, Any], *names: str) -> None:
    """Remove those of `names` that are null: clients write so what they leave out."""
    for name in names:
        if values.get(name, "") is None:
            del values[name]


def _check_parameters(parameters: Any, before: int = 0) -> None:
    """Raise E1005 for a parameter that is not allowed, or one too many beside those `before`."""
    if not isinstance(parameters, dict):
        raise InvalidArgument("parameters: must be an object")
    if (count := before + len(parameters)) > _MOST_PARAMETERS:
        raise InvalidArgument(f"parameters: {count}; {_MOST_PARAMETERS} at most")
    for name, given in parameters.items():
        if name in _TRITONS:
            wanted = bool if name in _FLAGS else int
            valid = type(given) is wanted and 0 <= given <= _TRITONS[name]
            if name == "sequence_id" and isinstance(given, str):
                valid = len(given) <= _MOST_ID
            rule = "true or false" if name in _FLAGS else f"from 0 to {_TRITONS[name]}"
        elif _OF_MODEL.fullmatch(name):
            valid = isinstance(given, bool | float) or (
                len(given) <= _MOST_TEXT
                if isinstance(given, str)
                else isinstance(given, int) and -(2**63) <= given < 2**63
            )
            rule = f"text of {_MOST_TEXT} characters at most, a number, true or false"
        else:
            allowed = f"{', '.join(_TRITONS)}, and names of the model's own"
            raise InvalidArgument(f"{printable(name[:_SHOWN])}: no parameter of clients: {allowed}")
        if not valid:
            raise InvalidArgument(f"{name}={_shown(given)}: must be {rule}")


def _require_known(where: str, given: Any, known: Iterable[str]) -> None:
    """Raise E1005 for the first name that is not one of `known`."""
    if not isinstance(given, dict):
        raise InvalidArgument(f"{printable(where[:_SHOWN])}: must be an object")
    if unknown := given.keys() - set(known):
        name, allowed = min(unknown)[:_SHOWN], sorted(known)
        raise InvalidArgument(
            f"{printable(where[:_SHOWN])}: {printable(name)}: not allowed"
            f"{nearest(name, allowed)}; allowed: {', '.join(allowed) or 'none'}"
        )


def _shown(value: Any) -> str:
    """A value for an error, short."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return repr(value[:_SHOWN] if isinstance(value, str) else value)[: 2 * _SHOWN]
