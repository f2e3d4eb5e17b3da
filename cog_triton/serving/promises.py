"""Promises of resumption: what a client gets whose engine dies, by what it asked and by family.

docs/supervision.md has them as a table; a test holds each against what is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FAMILIES = ("vLLM", "vLLM, runner V1", "TensorRT-LLM", "OpenVINO", "mock")
"""Columns. vLLM's second one is of engines that take no tokens as output; their log says why."""

EXACT = "exact"
"""The tokens are those of an undisturbed run."""
WHOLE = "whole"
"""It goes on to its end, with all that was asked of it; it may part at a near tie."""
DRAWN = "whole, redrawn"
"""So, too, but what comes is drawn with another seed."""
NONE = "-"
"""The engine does not take it: E1005."""

_GRAMMAR = "E2105: a grammar cannot begin amid its output"
_COUNTS = "E2105: counts output alone"
_BIAS = (
    "whole, as `logit_bias`; E2105 beside `repetition_penalty`, beyond 1024 tokens, and where a"
    " bias exceeds 100"
)
_LONG = "E2105 beyond `max_input_len`, else whole"
_GUIDED = (WHOLE, _GRAMMAR, _GRAMMAR, EXACT, NONE)
_PLAIN = (WHOLE, WHOLE, WHOLE, EXACT, EXACT)
_OTHER = "E2105: the front end is not ours"

PROMISES: Mapping[str, Sequence[str]] = {
    "greedy": _PLAIN,
    "a `seed` that was given": (WHOLE, DRAWN, DRAWN, EXACT, EXACT),
    "a random seed": (WHOLE, DRAWN, DRAWN, DRAWN, EXACT),
    "`repetition_penalty`": _PLAIN,
    "`frequency_penalty`": (WHOLE, _BIAS, WHOLE, EXACT, EXACT),
    "`presence_penalty`": (WHOLE, _COUNTS, WHOLE, EXACT, EXACT),
    "`min_tokens`": _PLAIN,
    "`logit_bias`": (WHOLE, WHOLE, WHOLE, NONE, EXACT),
    "JSON schema": _GUIDED,
    "regex": _GUIDED,
    "grammar": (*_GUIDED[:3], NONE, NONE),
    "forced tool": _GUIDED,
    "`tools: auto`, calls guided": (WHOLE, _GRAMMAR, NONE, EXACT, NONE),
    "reasoning": _PLAIN,
    "`n` > 1": _PLAIN,
    "log probabilities": _PLAIN,
    "LoRA adapter": (WHOLE, WHOLE, WHOLE, NONE, EXACT),
    "images": (WHOLE, WHOLE, NONE, NONE, NONE),
    "more than `max_input_len`": (WHOLE, WHOLE, _LONG, EXACT, EXACT),
    "`/v1/completions`, `/v1/chat/completions`, `/v1/responses`, `/v1/messages`, `/predictions`": (
        "as above",
        *["same"] * 4,
    ),
    "`generate`, `generate_stream` and gRPC of Triton": (_OTHER, *["same"] * 4),
}
"""By what is asked: what is promised, by `FAMILIES`. Where several are asked, the least holds."""


def table() -> str:
    """The table of docs/supervision.md."""
    lines = [f"| | {' | '.join(FAMILIES)} |", "|---" * (len(FAMILIES) + 1) + "|"]
    lines += [f"| {asked} | {' | '.join(cells)} |" for asked, cells in PROMISES.items()]
    return "\n".join(lines) + "\n"
