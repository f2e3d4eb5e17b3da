"""Options of the mock engine, and its requests' own: rate, jitter, prefill time, faults."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from cog_triton.engines import tensor_contract
from cog_triton.engines.request import EngineRequest
from cog_triton.errors import InvalidArgument, InvalidPredictorConfig, nearest

if TYPE_CHECKING:
    import numpy.typing as npt

_LEAST = {"tokens_per_response": 1, "max_batch_size": 1, "cancellation_check_period_ms": 1}
_MOST = {"jitter": 1.0}


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
    jitter: float = 0.0
    prefill_ms: float = 0.0
    tokens_per_response: int = 1
    join: bool = True
    max_batch_size: int = 256
    cancellation_check_period_ms: int = 100

    @property
    def is_flat_out(self) -> bool:
        """Whether sequences have no rate of their own."""
        return not (self.tps or self.step_ms)

    def rate(self, requested: float | None = None) -> float:
        """Tokens per second of a stream whose request asks for `requested`; 0 is flat out."""
        if self.step_ms:
            return 1000 * self.tokens_per_response / self.step_ms
        return self.tps if requested is None else requested

    @classmethod
    def parse(cls, arguments: Mapping[str, Any]) -> Self:
        """Options from a serve config's or a model's parameters; raises E1202."""
        kinds = {field.name: str(field.type) for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in arguments.items():
            if name not in kinds:
                raise InvalidPredictorConfig(
                    f"tensorrt_llm.args.{name}={value!r}: the mock engine has no such option"
                    f"{nearest(name, list(kinds))}"
                )
            read, kind = _KINDS[kinds[name]]
            values[name] = found = read(value)
            rule = broken_rule(name, -1 if found is None else found)
            if found is None or rule:
                must = kind if read is _bool else f"{kind}, {rule}"
                raise InvalidPredictorConfig(f"tensorrt_llm.args.{name}={value!r}: must be {must}")
        return cls(**values)


def broken_rule(name: str, value: float) -> str | None:
    """The rule of option `name` that `value` breaks, None if it breaks none."""
    least, most = _LEAST.get(name, 0), _MOST.get(name, math.inf)
    if least <= value <= most and value < math.inf:
        return None
    return f"at least {least}" if most == math.inf else f"from {least} to {most:g}"


def _float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    with suppress(ValueError):
        return float(value)
    return None


def _int(value: Any) -> int | None:
    with suppress(ValueError):
        return None if _float(value) is None else int(str(value))
    return None


def _bool(value: Any) -> bool | None:
    return {"true": True, "false": False}.get(str(value).lower())


_KINDS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "float": (_float, "a finite number"),
    "int": (_int, "a whole number"),
    "bool": (_bool, "true or false"),
}


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


def decode_request(tensors: Mapping[str, npt.NDArray[Any]]) -> MockRequest:
    """Decode a request from input tensors; raises E1005 naming what is wrong."""
    common = {name: tensor for name, tensor in tensors.items() if name not in INPUTS}
    own = {name: tensor for name, tensor in tensors.items() if name in INPUTS}
    values = {name: tensor_contract.scalar(name, tensor) for name, tensor in own.items()}
    return request_of(tensor_contract.decode_request(common), values)


def request_of(request: EngineRequest, inputs: Mapping[str, Any]) -> MockRequest:
    """The request with its `inputs` of `INPUTS`; raises E1005 naming what is wrong."""
    return MockRequest(
        **{field.name: getattr(request, field.name) for field in fields(request)},
        **{name: _checked(name, value) for name, value in inputs.items()},
    )


def _checked(name: str, value: Any) -> Any:
    if name == "inject":
        text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
        if text not in get_args(Injection):
            known = ", ".join(get_args(Injection))
            raise InvalidArgument(f"inject={text[:80]!r}: must be one of {known}")
        return text
    if rule := broken_rule(name, value):
        raise InvalidArgument(f"{name}={value:g}: must be {rule}")
    return value
