"""Options of the mock engine, and its requests' own: rate, jitter, prefill time, faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from cog_triton.engines import tensor_contract
from cog_triton.engines.engine_options import option, out_of_range, read_options
from cog_triton.engines.request import EngineRequest
from cog_triton.errors import InvalidArgument

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class MockOptions:
    """Run-time options of the mock engine.

    `tps` is tokens per second of one stream, 0 as fast as Triton takes them. `jitter` moves each
    token by up to half of it to either side, as a part of the time between two. `prefill_ms` passes
    for each input token before the first output token is begun. Tokens leave in groups of
    `tokens_per_response`, each when its last one is due. With `join` the groups of a stream that
    are late leave as one response, as with our own engines; else each is a response of its own, as
    with TensorRT-LLM's backend. Requests beyond `max_batch_size` wait.

    With a `step_ms` all running sequences advance together instead, every so many milliseconds, as
    an engine's batch does; `tps` and `jitter` mean nothing then, `tokens_per_response` is tokens of
    a sequence in one step.
    """

    tps: float = 44.0
    step_ms: float = 0.0
    jitter: float = option(0.0, most=1)
    prefill_ms: float = 0.0
    tokens_per_response: int = option(1, least=1)
    join: bool = True
    max_batch_size: int = option(256, least=1)
    cancellation_check_period_ms: int = option(100, least=1)

    @property
    def is_flat_out(self) -> bool:
        """Whether sequences have no rate of their own."""
        return not (self.tps or self.step_ms)

    def rate(self, requested: float | None = None) -> float:
        """Tokens per second of a stream whose request asks for `requested`; 0 is flat out."""
        if self.step_ms:
            return 1000 * self.tokens_per_response / self.step_ms
        return self.tps if requested is None else requested

    def of(self, request: MockRequest) -> Self:
        """These options with those that the request has of its own."""
        own = {name: getattr(request, name) for name in INPUTS if hasattr(self, name)}
        return replace(self, **{name: value for name, value in own.items() if value is not None})

    @classmethod
    def parse(cls, arguments: Mapping[str, Any]) -> Self:
        """Options from a serve config's or a model's parameters; raises E1202."""
        return read_options(cls, arguments, "the mock engine")


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


_FIELDS = {item.name: item for item in (*fields(MockRequest), *fields(MockOptions))}


def decode_request(tensors: Mapping[str, npt.NDArray[Any]]) -> MockRequest:
    """Decode a request from input tensors; raises E1005 naming what is wrong."""
    common = {name: tensor for name, tensor in tensors.items() if name not in INPUTS}
    own = {name: tensors[name] for name in INPUTS if name in tensors}
    values = {name: tensor_contract.scalar(name, tensor) for name, tensor in own.items()}
    return request_of(tensor_contract.decode_request(common), values)


def request_of(request: EngineRequest, inputs: Mapping[str, Any]) -> MockRequest:
    """The request with its `inputs` of `INPUTS`; raises E1005 naming what is wrong."""
    own = dict(inputs)
    for name, value in own.items():
        if name == "inject":
            text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
            if text not in get_args(Injection):
                known = ", ".join(get_args(Injection))
                raise InvalidArgument(f"inject={text[:80]!r}: must be one of {known}")
            own[name] = text
        elif rule := out_of_range(_FIELDS[name], value):
            raise InvalidArgument(f"{name}={value:g}: must be {rule}")
    common = {field.name: getattr(request, field.name) for field in fields(request)}
    return MockRequest(**common, **own)
