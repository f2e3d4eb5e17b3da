"""Bodies for Triton's HTTP API: checked for what ends Triton 24.10, and written anew."""

from __future__ import annotations

from typing import Any

from cog_triton import errors
from cog_triton.door.json_body import JSONLimits, parsed, written

_MAX_CLASSES = 1000


def rewritten_json(body: bytes, limits: JSONLimits) -> bytes:
    """A JSON object, written anew."""
    return written(parsed(body or b"{}", limits))


def rewritten_inference(
    body: bytes, header_length: bytes, limits: JSONLimits
) -> tuple[bytes, int | None]:
    """An inference request, its tensors in JSON or, binary, behind it; and its JSON's length.

    `header_length` is Inference-Header-Content-Length as it was sent, empty without binary tensors.
    """
    if header_length and not (
        header_length.isdigit() and len(header_length) < 12 and int(header_length) <= len(body)
    ):
        raise errors.InvalidArgument(
            f"Inference-Header-Content-Length={header_length[:20].decode('latin-1')!r}: must be"
            f" from 0 to the body's {len(body)} bytes"
        )
    size = int(header_length) if header_length else len(body)
    value = parsed(body[:size], limits)
    binary = _check_tensors(value)
    if binary != len(body) - size:
        raise errors.InvalidArgument(
            f"inputs: binary_data_size adds up to {binary} bytes, {len(body) - size} were sent"
        )
    head = written(value)
    return head + body[size:], len(head) if header_length else None


def _check_tensors(value: dict[str, Any]) -> int:
    """Bytes of binary tensors that follow; raises E1005 for what is not a client's to set."""
    binary = 0
    for kind in ("inputs", "outputs"):
        tensors = value.get(kind, [])
        if not isinstance(tensors, list) or not all(isinstance(one, dict) for one in tensors):
            raise errors.InvalidArgument(f"{kind}: must be a list of objects")
        for tensor in tensors:
            binary += _check_parameters(kind, tensor.get("parameters", {}))
    _check_parameters("parameters", value.get("parameters", {}))
    return binary


def _check_parameters(kind: str, parameters: Any) -> int:
    """Bytes of a binary input."""
    if not isinstance(parameters, dict):
        raise errors.InvalidArgument(f"{kind}: parameters must be an object")
    for name, given in parameters.items():
        if name.startswith("shared_memory_"):
            raise errors.InvalidArgument(f"{kind}: {name}: shared memory is not for clients")
        if name in ("binary_data_size", "classification"):
            most = _MAX_CLASSES if name == "classification" else None
            if type(given) is not int or given < 0 or (most is not None and given > most):
                rule = f"a whole number from 0 to {most}" if most else "a whole number"
                raise errors.InvalidArgument(f"{kind}: {name}={str(given)[:20]}: must be {rule}")
    return int(parameters.get("binary_data_size", 0)) if kind == "inputs" else 0
