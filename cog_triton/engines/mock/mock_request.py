"""What a request may ask of the mock beside the numeric contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import numpy.typing as npt

from cog_triton.engines import tensor_contract
from cog_triton.engines.mock.mock_options import broken_rule
from cog_triton.engines.request import EngineRequest
from cog_triton.errors import InvalidArgument

Injection = Literal["error", "crash", "hang"]
INPUTS = {
    "tps": "TYPE_FP32",
    "jitter": "TYPE_FP32",
    "prefill_ms": "TYPE_FP32",
    "tokens_per_response": "TYPE_INT32",
    "inject": "TYPE_STRING",
    "inject_after": "TYPE_INT32",
}
"""The optional inputs that the mock's ``tensorrt_llm`` has besides, each of one value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MockRequest(EngineRequest):
    """None is the server's own; see `MockOptions`.

    After `inject_after` output tokens the request fails (error), the engine's process dies (crash),
    or the engine stands still for all requests (hang).
    """

    tps: float | None = None
    jitter: float | None = None
    prefill_ms: float | None = None
    tokens_per_response: int | None = None
    inject: Injection | None = None
    inject_after: int = 0


def decode_request(tensors: Mapping[str, npt.NDArray[Any]]) -> MockRequest:
    """Read a request's input tensors; raises E1005 naming what is wrong."""
    common = {name: tensor for name, tensor in tensors.items() if name not in INPUTS}
    request = tensor_contract.decode_request(common)
    return MockRequest(
        **{field.name: getattr(request, field.name) for field in fields(request)},
        **{name: _value(name, tensors[name]) for name in INPUTS if name in tensors},
    )


def _value(name: str, tensor: npt.NDArray[Any]) -> Any:
    if tensor.size != 1:
        raise InvalidArgument(f"{name}: shape {list(tensor.shape)}; must hold one value")
    value = tensor.item()
    if name == "inject":
        text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
        if text not in get_args(Injection):
            known = ", ".join(get_args(Injection))
            raise InvalidArgument(f"inject={text[:80]!r}: must be one of {known}")
        return text
    if rule := broken_rule(name, value):
        raise InvalidArgument(f"{name}={value:g}: must be {rule}")
    return value
