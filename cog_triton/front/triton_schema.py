"""One schema a route of Triton's HTTP API: the names that a body may have, a rule for each value.

Triton 24.10 takes more than it survives, such as `classification` of text, or a shape of 2**62
values: only what was checked here is written again. Names and types: Triton's http_server.cc.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple

from cog_triton.errors import InvalidArgument, nearest
from cog_triton.front.json_body import JSONLimits, parsed, written
from cog_triton.system.printable import printable, shortened


class ModelTensors(NamedTuple):
    """Tensors of one model: types of its inputs by name (``BYTES``, ``INT32``), its outputs."""

    inputs: Mapping[str, str]
    outputs: frozenset[str]


class _Rule(NamedTuple):
    """What a value must be, in words, and the check of it."""

    words: str
    follows: Callable[[Any], bool]

    def require(self, given: Any, name: str) -> None:
        if not self.follows(given):
            raise InvalidArgument(f"{name}={shortened(given)}: must be {self.words}")


def _whole(least: int, most: int) -> _Rule:
    words = f"from {least} to {most}" if least < most else f"{most}"
    return _Rule(words, lambda given: type(given) is int and least <= given <= most)


def _text(most: int) -> _Rule:
    words = f"text of {most} characters at most"
    return _Rule(words, lambda given: type(given) is str and len(given) <= most)


def _either(*rules: _Rule) -> _Rule:
    words = ", ".join(rule.words for rule in rules)
    return _Rule(words, lambda given: any(rule.follows(given) for rule in rules))


def _is_shape(given: Any) -> bool:
    whole = type(given) is list and {*map(type, given)} == {int} and min(given) >= 0
    return whole and len(given) <= 16 and math.prod(size or 1 for size in given) < 2**31


_Schema = Mapping[str, _Rule]
_ANY = _Rule("", lambda given: True)
_FLAG = _Rule("true or false", lambda given: type(given) is bool)
_INT64 = _whole(-(2**63), 2**63 - 1)
_NUMBER = _Rule("a number", lambda given: type(given) is float or _INT64.follows(given))
_PLAIN = _either(_text(64 << 10), _NUMBER, _FLAG)
_OBJECT = _Rule("an object", lambda given: type(given) is dict)
_TENSORS = _Rule(
    "a list of objects", lambda given: type(given) is list and {*map(type, given)} <= {dict}
)
_SHAPE = _Rule(f"1 to 16 whole numbers, with a product of {2**31 - 1} at most", _is_shape)
_INDEX = {"ready": _FLAG}
_GENERATE = {"id": _text(1024), "parameters": _OBJECT}  # inputs and parameters of the model, too
_INFER = {**_GENERATE, "inputs": _TENSORS, "outputs": _TENSORS}
_OUTPUT = {"name": _ANY, "parameters": _OBJECT}
_OUTPUT_PARAMETERS = {"binary_data": _FLAG}
_INPUT = {**_OUTPUT, "data": _ANY, "datatype": _ANY, "shape": _SHAPE}
# Parameters that Triton itself reads. All others are the model's: a name and a plain value.
_PARAMETERS = dict.fromkeys(("binary_data_output", "sequence_end", "sequence_start"), _FLAG) | {
    "priority": _whole(0, 2**32 - 1),
    "sequence_id": _either(_whole(0, 2**64 - 1), _text(1024)),
    "timeout": _whole(0, 2**63 - 1),
}
_RESERVED = r"triton_|shared_memory_|classification|binary_data"
_OF_MODEL = re.compile(rf"(?!{_RESERVED})[A-Za-z_][\w.-]{{0,63}}", re.ASCII)
_NULLABLE = ("id", "outputs", "parameters")  # clients write null for what they leave out
# By datatype: bytes of a binary element, types of JSON (others are binary alone), and the range.
_SIZES = {"BOOL": 1, "BF16": 2, "FP16": 2, "FP32": 4, "FP64": 8}
_FLOATS = {"FP32": 3.4028235677973366e38, "FP64": 1.7976931348623157e308}
_TYPES: dict[str, set[type]] = {name: {int, float} for name in _FLOATS}
_TYPES |= {"BOOL": {bool}, "BYTES": {str}}
_RANGES: dict[str, tuple[float, float]] = {name: (-most, most) for name, most in _FLOATS.items()}
for _bits in (8, 16, 32, 64):
    for _name, _least in ((f"INT{_bits}", -(1 << _bits - 1)), (f"UINT{_bits}", 0)):
        _SIZES[_name], _TYPES[_name] = _bits // 8, {int}
        _RANGES[_name] = _least, _least + (1 << _bits) - 1


def rewritten_index(body: bytes, limits: JSONLimits) -> bytes:
    """A request for the list of models."""
    return written(_checked(parsed(body or b"{}", limits), _INDEX))


def rewritten_generation(body: bytes, limits: JSONLimits, model: ModelTensors) -> bytes:
    """A request to generate: inputs of the `model` by name, and parameters."""
    value = parsed(body or b"{}", limits)
    _checked(value, dict.fromkeys(value, _ANY) | _GENERATE)
    _check_parameters(value, _GENERATE, model.inputs)
    return written(value)


def rewritten_inference(
    body: bytes, header_length: bytes, limits: JSONLimits, model: ModelTensors
) -> tuple[bytes, int | None]:
    """An inference request, and the length of its JSON if, as in `header_length`, one was sent."""
    length = header_length or b"%d" % len(body)
    if not length.isdigit() or len(length) > 11 or int(length) > len(body):
        given, rule = length[:20].decode("latin-1"), f"from 0 to the body's {len(body)} bytes"
        raise InvalidArgument(f"Inference-Header-Content-Length={given!r}: must be {rule}")
    value = _checked(parsed(body[: int(length)], limits), _INFER)
    _check_parameters(value, _INFER, {})
    for kind, known in (("inputs", model.inputs), ("outputs", model.outputs)):
        names = [tensor.get("name") for tensor in value.get(kind, ())]
        if not {*map(type, names)} <= {str} or len({*names}) < len(names):
            raise InvalidArgument(f"{kind}: each must have a name of its own")
        _checked(dict.fromkeys(names), dict.fromkeys(known, _ANY), kind)
    binary, size = body[int(length) :], 0
    for tensor in value.get("inputs", ()):
        name, datatype = tensor["name"], model.inputs[tensor["name"]]
        same = _Rule(repr(datatype), [datatype].__contains__)
        parameters = _checked(tensor, _INPUT | {"datatype": same}, name).get("parameters")
        count = math.prod(tensor["shape"])
        if parameters:
            least = count * _SIZES.get(datatype, 4)  # the length before each element of BYTES
            enough = _whole(least, least if datatype in _SIZES else 2**63)
            _checked(parameters, {"binary_data_size": enough}, f"parameters of {name}")
            size += parameters["binary_data_size"]
            if "data" in tensor:
                raise InvalidArgument(f"{name}: data: must not be there beside binary_data_size")
        else:
            tensor["data"] = _elements(name, datatype, tensor.get("data"))
            if (found := len(tensor["data"])) != count:
                raise InvalidArgument(f"{name}: shape has {count} elements, data has {found}")
    for tensor in value.get("outputs", ()):
        name = tensor["name"]
        parameters = _checked(tensor, _OUTPUT, name).get("parameters", {})
        _checked(parameters, _OUTPUT_PARAMETERS, f"parameters of {name}")
    if size != (sent := len(binary)):
        raise InvalidArgument(f"inputs: binary_data_size adds up to {size} bytes, {sent} were sent")
    head = written(value)
    return head + binary, len(head) if header_length else None


def _elements(name: str, datatype: str, data: Any) -> list[Any]:
    """Elements of a tensor, in order; of lists of lists, those of the innermost."""
    if (types := _TYPES.get(datatype)) is None:
        raise InvalidArgument(f"{name}: {datatype} must be a binary tensor of infer")
    elements = data if isinstance(data, list) else [data]
    while (found := {*map(type, elements)}) == {list}:  # as often as the body may be nested
        elements = list(chain.from_iterable(elements))
    if not found <= types:
        rule = _Rule(f"{datatype}, in lists of one depth", lambda item: type(item) in types)
        rule.require(next(item for item in elements if type(item) not in types), name)
    for extreme in (min(elements), max(elements)) if elements and datatype in _RANGES else ():
        if not _RANGES[datatype][0] <= extreme <= _RANGES[datatype][1]:
            raise InvalidArgument(f"{name}={shortened(extreme)}: beyond {datatype}")
    return elements


def _check_parameters(request: dict[str, Any], own: _Schema, inputs: Mapping[str, str]) -> None:
    """Check inputs, whose lists become flat, and parameters; Triton reads both levels in full."""
    others = []
    for values, level in ((request, own), (request.get("parameters", {}), {})):
        for name, given in values.items():
            if name in inputs:
                elements = _elements(name, inputs[name], given)
                values[name] = elements if isinstance(given, list) else given
            elif name not in level:
                others.append((name, given))
    if len(others) > 64:
        raise InvalidArgument(f"parameters: {len(others)}; 64 at most")
    for name, given in others:
        if name not in _PARAMETERS and not _OF_MODEL.fullmatch(name):
            rule = (
                f"no parameter of clients: {', '.join(_PARAMETERS)}, and names of the model's own"
            )
            raise InvalidArgument(f"{printable(name[:80])}: {rule}")
        _PARAMETERS.get(name, _PLAIN).require(given, name)


def _checked(values: dict[str, Any], members: _Schema, where: str = "") -> dict[str, Any]:
    """The object, without nulls; raises E1005 for a name not in `members`, and a rule broken."""
    if unknown := values.keys() - members.keys():
        name, allowed = min(unknown)[:80], sorted(members)
        hint = f"{nearest(name, allowed)}; allowed: {', '.join(allowed) or 'none'}"
        raise InvalidArgument(f"{where or 'request'}: {printable(name)}: not allowed{hint}")
    for name, rule in members.items():
        given = values.get(name)
        if given is None and name in _NULLABLE and rule is not _ANY:
            values.pop(name, None)
        elif name in values or name in ("datatype", "shape"):
            rule.require(given, f"{where}: {name}" if where else name)
    return values
