"""Request inputs that only the mock engine has: rate, jitter, prefill time, fault injection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from cog_triton.engines import tensor_contract
from cog_triton.engines.mock.mock_options import broken_rule
from cog_triton.engines.request import EngineRequest
from cog_triton.errors import InvalidArgument
from cog_triton.ipc.messages import message

if TYPE_CHECKING:
    import numpy.typing as npt

Injection = Literal["error", "crash", "hang"]
INPUTS = {
    "tps": "TYPE_FP32",
    "jitter": "TYPE_FP32",
    "prefill_ms": "TYPE_FP32",
    "tokens_per_response": "TYPE_INT32",
    "inject": "TYPE_STRING",
    "inject_after": "TYPE_INT32",
}
"""Optional inputs beside the tensor contract, each of one value: Triton type by name."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class MockRequest(EngineRequest):
    """Request to the mock engine; None means the server's own option, see `MockOptions`.

    After `inject_after` output tokens the request fails (error), the engine's process dies (crash),
    or the engine stops for all requests (hang); those of a generation that is resumed count.
    """

    tps: float | None = None
    jitter: float | None = None
    prefill_ms: float | None = None
    tokens_per_response: int | None = None
    inject: Injection | None = None
    inject_after: int = 0


def decode_request(tensors: Mapping[str, npt.NDArray[Any]]) -> MockRequest:
    """Decode a request from input tensors; raises E1005 naming what is wrong."""
    common = {name: tensor for name, tensor in tensors.items() if name not in INPUTS}
    request = tensor_contract.decode_request(common)
    return MockRequest(
        **{field.name: getattr(request, field.name) for field in fields(request)},
        **{name: _value(name, tensors[name]) for name in INPUTS if name in tensors},
    )


def _value(name: str, tensor: npt.NDArray[Any]) -> Any:
    value = tensor_contract.scalar(name, tensor)
    if name == "inject":
        text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
        if text not in get_args(Injection):
            known = ", ".join(get_args(Injection))
            raise InvalidArgument(f"inject={text[:80]!r}: must be one of {known}")
        return text
    if rule := broken_rule(name, value):
        raise InvalidArgument(f"{name}={value:g}: must be {rule}")
    return value
