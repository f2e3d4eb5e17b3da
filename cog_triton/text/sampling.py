"""Sampling parameters: one validated set, shared by every engine family, and the table of them.

`SamplingParams` is the table: each field has its type, its default and, as metadata, what every API
and engine makes of it. Checks, bodies of ``/v1``, inputs of predictions, tensors, the libraries'
arguments, abilities, ``/v1/models`` and tables of the documents are read from there.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from cog_triton.errors import InvalidArgument
from cog_triton.system.printable import shortened

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_SEED = 2**64 - 1
MAX_TOKENS = 2**31 - 1
"""Tokens are counted in 32 bits, which bounds `max_tokens`, `min_tokens` and `top_k`."""
MAX_TOKEN_IDS = 1024
"""Token ids that a request may name in one field, as vLLM's workers have it."""
Library = Literal["vllm", "openvino"]


class Rule(NamedTuple):
    """Range that a value must be in, and how an error tells it."""

    least: float
    most: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestField:
    """Row of the table: a field of a request, as every API and engine has it.

    Attributes:
        rules: what any engine asks of its value.
        tensor: its input of the Triton model ``tensorrt_llm``, if that is not named as the field
            and the input of the text models are; "" where it travels in ``request_extras``.
        body: its bounds in bodies of ``/v1``, as pydantic has them; None if it is not in them.
        inputs: its bounds in inputs of predictions, as Cog has them; None if it is not in them.
        read: the value that one of a body or of a prediction stands for.
        drawn: whether it counts only where tokens are drawn, not in greedy decoding.
        optional: whether it is an ability: where an engine lacks it, it is refused by name.
        ids: whether its items, or keys, are token ids.
        libraries: its name in an engine's library, if that is another; "" if it has none there.
        passed: what the libraries are given for its value, None for nothing.
    """

    name: str = ""
    default: Any = None
    rules: tuple[Rule, ...] = ()
    tensor: str = "{name}"
    body: Mapping[str, Any] | None = None
    inputs: Mapping[str, Any] | None = None
    read: Callable[[Any], Any] = lambda value: value
    drawn: bool = False
    optional: bool = False
    ids: bool = False
    libraries: Mapping[Library, str] = field(default_factory=dict)
    passed: Callable[[Any], Any] = lambda value: value

    def check(self, value: Any) -> None:
        """Raise E1005 for a value that is out of range."""
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidArgument(f"{self.name}={value}: must be a finite number")
        for least, most, text in self.rules:
            if not least <= value <= most:
                raise InvalidArgument(f"{self.name}={value}: {text}")


def row(default: Any = MISSING, *, factory: Any = MISSING, **values: Any) -> Any:
    """A dataclass's field that is a row of the table."""
    metadata = {"row": RequestField(**values)}
    if factory is not MISSING:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def rows(kind: type[DataclassInstance]) -> tuple[RequestField, ...]:
    """The rows of a dataclass, whose other fields have codecs."""
    found = []
    for item in fields(kind):
        if given := item.metadata.get("row"):
            tensor = given.tensor.format(name=item.name)
            found.append(replace(given, name=item.name, tensor=tensor))
    return tuple(found)


class DrawnSeed(int):
    """Random seed that the client has not given: what goes on may draw otherwise."""


def resolve_seed(seed: float | None) -> int:
    """A request's seed, without its sign (modulo 2^64); None and -1 ask for a `DrawnSeed`."""
    if seed is None or seed == -1:
        return DrawnSeed(secrets.randbelow(2**31))
    return int(seed) + (2**64 if -(2**63) <= seed < 0 else 0)


def _by_token(bias: Mapping[str, float]) -> dict[int, float]:
    """A bias by token id, which JSON has as text."""
    for token, value in bias.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise InvalidArgument(f"logit_bias: {shortened(token)} is not a token id")
        if not -100 <= value <= 100:
            raise InvalidArgument(f"logit_bias.{token}={value:g}: must be from -100 to 100")
    return {int(token): value for token, value in bias.items()}


_LESS = Rule(-math.inf, MAX_TOKENS, "must be less than 2^31")
_POSITIVE = Rule(1, math.inf, "must be at least 1")
_NOT_NEGATIVE = Rule(0, math.inf, "must not be negative")
_PART = Rule(0, 1, "must be from 0 to 1")
_MORE_THAN_0 = Rule(math.nextafter(0, 1), math.inf, "must be greater than 0")
_SEED = Rule(0, MAX_SEED, "must be from 0 to 2^64 - 1")
_FROM_0_TO_1 = {"ge": 0, "le": 1}
_PENALTY = {"ge": -2, "le": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request; construction raises E1005 naming one out of range.

    `max_tokens` and `min_tokens` count generated tokens. `temperature` 0, `top_k` 1, or
    `top_k` 0 with `top_p` 0 mean greedy decoding; `top_k` 0 alone turns top-k off. The
    penalties act on generated tokens, 1.0 (repetition, length) and 0.0 (presence,
    frequency) being neutral. `min_p` leaves out tokens less likely than that part of the likeliest
    one. `logit_bias` is added to the logits of token ids. Tokens other than `allowed_token_ids` are
    never made, if there are any.
    """

    max_tokens: int = row(
        rules=(_POSITIVE, _LESS),
        tensor="request_output_len",
        body={"ge": 1, "le": MAX_TOKENS},
        inputs={"ge": 1},
        libraries={"openvino": "max_new_tokens"},
    )
    min_tokens: int = row(
        0,
        rules=(_LESS, _NOT_NEGATIVE),
        body={"ge": 0},
        inputs={"ge": -1},
        libraries={"openvino": "min_new_tokens"},
    )
    temperature: float = row(
        1.0, rules=(_NOT_NEGATIVE,), body={"ge": 0, "le": 2}, inputs={"ge": 0, "le": 5}, drawn=True
    )
    top_k: int = row(
        0,
        rules=(_LESS, _NOT_NEGATIVE),
        tensor="runtime_top_k",
        body={"ge": -1},
        inputs={"ge": -1},
        read=lambda value: max(int(value), 0),
        drawn=True,
    )
    top_p: float = row(
        0.0,
        rules=(_PART,),
        tensor="runtime_top_p",
        body=_FROM_0_TO_1,
        inputs=_FROM_0_TO_1,
        drawn=True,
        passed=lambda value: value or 1.0,
    )
    repetition_penalty: float = row(1.0, rules=(_MORE_THAN_0,), body={"gt": 0}, inputs={})
    presence_penalty: float = row(0.0, body=_PENALTY, inputs={})
    frequency_penalty: float = row(0.0, body=_PENALTY, inputs={})
    # Without beam search it has no effect.
    length_penalty: float = row(
        1.0,
        tensor="len_penalty",
        inputs={"ge": 0, "le": 5},
        libraries={"vllm": "", "openvino": ""},
    )
    seed: int = row(
        0,
        rules=(_SEED,),
        body={},
        inputs={},
        read=resolve_seed,
        drawn=True,
        libraries={"openvino": "rng_seed"},
        passed=lambda value: value & (2**63 - 1),  # they keep seeds in an int64
    )
    min_p: float = row(
        0.0,
        rules=(_PART,),
        tensor="",
        body=_FROM_0_TO_1,
        drawn=True,
        optional=True,
    )
    logit_bias: Mapping[int, float] = row(
        factory=dict,
        tensor="",
        body={"max_length": MAX_TOKEN_IDS},
        read=_by_token,
        optional=True,
        ids=True,
        libraries={"openvino": ""},
        passed=lambda value: dict(value) or None,
    )
    allowed_token_ids: tuple[int, ...] = row(
        (),
        tensor="",
        body={"max_length": MAX_TOKEN_IDS},
        read=tuple,
        optional=True,
        ids=True,
        libraries={"openvino": ""},
        passed=lambda value: list(value) or None,
    )

    def __post_init__(self) -> None:
        for item in SAMPLING:
            item.check(getattr(self, item.name))
        if self.min_tokens > self.max_tokens:
            raise InvalidArgument(
                f"min_tokens={self.min_tokens}: must not exceed max_tokens={self.max_tokens}"
            )

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy, so the random seed has no effect."""
        return self.temperature == 0 or self.top_k == 1 or (self.top_k == 0 and self.top_p == 0)

    def arguments(self, library: Library) -> dict[str, Any]:
        """Values by the names of an engine's library, without those that count for nothing.

        Raises E1005 for an ability that the library lacks.
        """
        found: dict[str, Any] = {}
        for item in SAMPLING:
            value, name = getattr(self, item.name), item.libraries.get(library, item.name)
            if item.optional and value and not name:
                raise InvalidArgument(f"{item.name}: this engine does not support it")
            if name and not (item.drawn and self.greedy):
                found[name] = item.passed(value)
        return {name: value for name, value in found.items() if value is not None}


SAMPLING = rows(SamplingParams)
ABILITIES = sorted(item.name for item in SAMPLING if item.optional)
"""Fields that not every engine has."""
