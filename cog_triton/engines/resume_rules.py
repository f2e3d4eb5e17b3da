"""Resumption rules of an engine family: what of a request goes on in an engine that is new.

The front end resumes a generation from its prompt and the tokens made so far. An engine takes
these for a prompt: what counts output alone begins anew, unless it is carried otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRules:
    """Resumption rules of an engine family; by default what counts output alone is not carried.

    `frequency_penalty` and `presence_penalty` are ``sequence`` where the engine counts prompt and
    output alike, ``logit_bias`` where a bias is the same, None where it cannot be carried.
    `max_input_len` says whether prompt and tokens made must fit the engine's max_input_len.
    """

    frequency_penalty: Literal["sequence", "logit_bias"] | None = None
    presence_penalty: Literal["sequence"] | None = None
    max_input_len: bool = False
