"""Prometheus metrics of the server: changes between two scrapes."""

from __future__ import annotations

import re
from collections.abc import Mapping

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{[^}]*\})? (\S+)", re.MULTILINE)
_SUM = re.compile(r"(?P<base>.+)_sum")
_LABEL = re.compile(r"(\w+)=\"([^\"]*)\"")
_WANTED = re.compile(
    r"(time_to_first_token|inter_token_latency|time_per_output_token|queue_time|request_duration"
    r"|e2e_request_latency)_seconds$"
)
_TRITON = re.compile(r"nv_inference_(request|queue|compute_infer)_duration_us")
Samples = Mapping[tuple[str, str], float]


def parse(text: str) -> Samples:
    """Parse metrics into values by name and labels."""
    found: dict[tuple[str, str], float] = {}
    for name, labels, value in _LINE.findall(text):
        try:
            found[name, labels] = float(value)
        except ValueError:
            continue
    return found


def means(before: Samples, after: Samples) -> dict[str, float]:
    """Mean seconds of each request histogram, and tokens generated, between two scrapes."""
    change = {key: value - before.get(key, 0.0) for key, value in after.items()}
    found: dict[str, float] = {}
    for (name, labels), value in change.items():
        match = _SUM.fullmatch(name)
        if match and _WANTED.search(match["base"]):
            count = change.get((f"{match['base']}_count", labels), 0)
            if count > 0:
                found[f"{match['base']}{_short(labels)}"] = value / count
        elif name.endswith("generation_tokens_total") and value > 0:
            found[name] = value
        elif (match := _TRITON.fullmatch(name)) and value > 0:
            count = change.get(("nv_inference_request_success", labels), 0)
            if count > 0:
                found[f"{match[0].removesuffix('_us')}_seconds{_short(labels)}"] = (
                    value / count / 1e6
                )
    return found


def _short(labels: str) -> str:
    """Label of the model, which tells Triton's models apart."""
    values = dict(_LABEL.findall(labels))
    model = values.get("model") if "version" in values else None
    return f" ({model})" if model else ""
