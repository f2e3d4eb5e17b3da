"""Grafana dashboard of a server's /metrics: writes deploy/helm/dashboards/cog-triton.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

DASHBOARD = Path(__file__).parent.parent / "deploy" / "helm" / "dashboards" / "cog-triton.json"
_SELECTOR = 'job=~"$job",instance=~"$instance"'
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS, _HEIGHT = 24, 8


class Panel(NamedTuple):
    """A panel of curves: PromQL by legend; `S` in an expression selects the servers.

    `unit` is an id of Grafana's, `maximum` the upper end of the scale where there is one.
    """

    title: str
    unit: str
    queries: Mapping[str, str]
    description: str
    maximum: float | None = None
    stacked: bool = False


def _rate(metric: str, by: str = "instance") -> str:
    return f"sum by ({by}) (rate(cog_triton_{metric}{{S}}[$__rate_interval]))"


def _quantiles(metric: str) -> dict[str, str]:
    rate = _rate(f"{metric}_bucket", by="le")
    return {
        f"p{round(quantile * 100)}": f"histogram_quantile({quantile}, {rate})"
        for quantile in (0.5, 0.95, 0.99)
    }


ROWS: Mapping[str, Sequence[Panel]] = {
    "Requests": (
        Panel(
            "Requests now",
            "short",
            {
                "running {{instance}}": "cog_triton_requests_running{S}",
                "waiting {{instance}}": "cog_triton_requests_waiting{S}",
            },
            "Requests the engine has, and requests that wait for a slot. Scale on those that wait.",
        ),
        Panel(
            "Requests that ended",
            "reqps",
            {"{{endpoint}} {{outcome}}": _rate("requests_total", "endpoint, outcome")},
            "By endpoint, and by how: stop, length, cancelled or error.",
            stacked=True,
        ),
        Panel(
            "Errors and cancellations",
            "reqps",
            {
                "{{code}}": _rate("errors_total", "code"),
                "cancelled": _rate("requests_cancelled_total", "job"),
            },
            "Errors by code (docs/errors.md), refused requests among them; clients that left.",
            stacked=True,
        ),
        Panel(
            "Deaths of the engine",
            "reqps",
            {
                "interrupted {{instance}}": _rate("interruptions_total"),
                "resumed {{instance}}": _rate("resumed_total"),
                "ended: {{reason}}": _rate("not_resumed_total", "reason"),
            },
            "Generations that lost the engine, that went on after its return, and that could not.",
        ),
    ),
    "Latency": (
        Panel(
            "Time to first token",
            "s",
            _quantiles("time_to_first_token_seconds"),
            "From the arrival of a request to its first token, queue included.",
        ),
        Panel(
            "Inter-token latency",
            "s",
            _quantiles("inter_token_latency_seconds"),
            "Between two tokens of a stream; of tokens that came together, their share.",
        ),
        Panel(
            "Queue time",
            "s",
            _quantiles("queue_time_seconds"),
            "From the arrival of a request to its turn in the engine.",
        ),
        Panel(
            "Request duration",
            "s",
            _quantiles("request_duration_seconds"),
            "From the arrival of a request to its end, however it ended.",
        ),
    ),
    "Tokens": (
        Panel(
            "Tokens generated",
            "suffix:tokens/s",
            {"{{instance}}": _rate("generation_tokens_total")},
            "Counted when a request ends.",
            stacked=True,
        ),
        Panel(
            "Tokens of prompts",
            "suffix:tokens/s",
            {"{{instance}}": _rate("prompt_tokens_total")},
            "Counted when a request ends.",
            stacked=True,
        ),
        Panel(
            "Length of prompts",
            "suffix:tokens",
            _quantiles("request_prompt_tokens"),
            "Tokens of a prompt, chat template included.",
        ),
        Panel(
            "Length of outputs",
            "suffix:tokens",
            _quantiles("request_generation_tokens"),
            "Tokens of an output.",
        ),
        Panel(
            "Power of the GPUs",
            "watt",
            {"{{part}} {{instance}}": _rate("gpu_energy_joules_total", "part, instance")},
            "For generations, and what they would have used idle; where their driver counts it.",
            stacked=True,
        ),
    ),
    "Tenants": (
        Panel(
            "Tokens by tenant",
            "suffix:tokens/s",
            {
                "{{tenant}} output": _rate("tenant_generation_tokens_total", "tenant"),
                "{{tenant}} prompts": _rate("tenant_prompt_tokens_total", "tenant"),
            },
            "Of keys of COG_TRITON_KEYS (docs/tenants.md). Counted when a request ends.",
            stacked=True,
        ),
        Panel(
            "Requests by tenant",
            "reqps",
            {
                "{{tenant}} {{outcome}}": _rate("tenant_requests_total", "tenant, outcome"),
                "{{tenant}} {{code}}": _rate("tenant_refused_total", "tenant, code"),
                "{{tenant}} {{status}} at the door": _rate("door_refused_total", "tenant, status"),
            },
            "Those that ended, and refusals by code, limits of keys among them.",
            stacked=True,
        ),
        Panel(
            "Waiting by tenant",
            "s",
            {
                "{{tenant}}": f"{_rate('tenant_queue_seconds_total', 'tenant')} /"
                f" {_rate('tenant_requests_total', 'tenant')}"
            },
            "Mean time in the queue.",
        ),
        Panel(
            "Streams by tenant",
            "short",
            {"{{tenant}}": _rate("tenant_engine_seconds_total", "tenant")},
            "Requests in the engine, on average: seconds there a second.",
            stacked=True,
        ),
        Panel(
            "Power by tenant",
            "watt",
            {"{{tenant}}": _rate("tenant_energy_joules_total", "tenant")},
            "Of the GPUs, shared over tokens. Counted when a request ends.",
            stacked=True,
        ),
    ),
    "KV cache": (
        Panel(
            "KV cache in use",
            "percentunit",
            {"{{instance}}": "cog_triton_kv_cache_usage_ratio{S}"},
            "Share of the engine's KV cache that running requests use. At 1 requests wait for it.",
            maximum=1,
        ),
        Panel(
            "Prompt tokens found in the KV cache",
            "percentunit",
            {
                "of lookups {{instance}}": f"{_rate('prefix_cache_hits_total')} /"
                f" {_rate('prefix_cache_queries_total')}",
                "of all prompts {{instance}}": f"{_rate('prefix_cache_hits_total')} /"
                f" ({_rate('prompt_tokens_total')} > 0)",
            },
            "Prefix cache hits of vLLM, and of TensorRT-LLM, which counts no lookups.",
            maximum=1,
        ),
    ),
    "Server": (
        Panel(
            "Ready",
            "bool_yes_no",
            {
                "{{instance}}": "cog_triton_ready{S}",
                "engines {{instance}}": "cog_triton_engines{S}",
            },
            "Whether requests are served: not while Triton is started again, or after it failed.",
            maximum=1,
        ),
        Panel(
            "Engine restarts and lost steps",
            "short",
            {
                "restarts {{instance}}": "increase(cog_triton_engine_restarts_total{S}[1h])",
                "planned {{instance}}": "increase(cog_triton_planned_restarts_total{S}[1h])",
                "lost steps {{instance}}": "increase(cog_triton_steps_lost_total{S}[1h])",
            },
            "In the last hour. A restart costs its requests nothing but time, if they can resume.",
        ),
        Panel(
            "Step lag",
            "suffix:steps",
            {"{{instance}}": "cog_triton_step_lag{S}"},
            "Engine steps that the last read brought: 1 while the server keeps up.",
        ),
        Panel(
            "CPU of the Cog worker",
            "percentunit",
            {"{{instance}}": "rate(process_cpu_seconds_total{S}[$__rate_interval])"},
            "1 is one core; the worker tokenizes, detokenizes and streams.",
        ),
        Panel(
            "Memory of engine processes",
            "bytes",
            {"{{state}} {{instance}}": "cog_triton_engine_memory_bytes{S}"},
            "Resident host memory: of engines at work, and of spares (SPARE_ENGINE).",
        ),
        Panel(
            "Memory of the Cog worker",
            "bytes",
            {"{{instance}}": "process_resident_memory_bytes{S}"},
            "Resident.",
        ),
    ),
    "Models that share a GPU (serve --swap)": (
        Panel(
            "Model that has the GPU",
            "bool_yes_no",
            {"{{model}} {{instance}}": "cog_triton_model_resident{S}"},
            "One at a time; requests for the others wait for their turn.",
            maximum=1,
        ),
        Panel(
            "Swaps",
            "suffix:/min",
            {"to {{model}}": f"60 * {_rate('swaps_total', 'model')}"},
            "Many mean that models are asked for in turn: a longer SWAP_RESIDENCE makes fewer.",
            stacked=True,
        ),
        Panel(
            "Time of a swap",
            "s",
            {
                "to {{model}}": f"{_rate('swap_seconds_total', 'model')} /"
                f" ({_rate('swaps_total', 'model')} > 0)"
            },
            "Parks one engine and takes the other back, once the requests of the first have ended.",
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's JSON, as its import takes it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": y, "w": _COLUMNS, "h": 1}
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": place})
        for column, panel in enumerate(row):
            x, end = (_COLUMNS * place // len(row) for place in (column, column + 1))
            panels.append(_panel(panel, {"x": x, "y": y + 1, "w": end - x, "h": _HEIGHT}))
        y += 1 + _HEIGHT
    for number, made in enumerate(panels, 1):
        made["id"] = number
    return {
        "uid": "cog-triton",
        "title": "cog-triton",
        "tags": ["cog-triton", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource_variable(), _variable("job"), _variable("instance")]},
        "panels": panels,
    }


def _panel(panel: Panel, place: Mapping[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "custom": {
            "lineWidth": 1,
            "fillOpacity": 30 if panel.stacked else 10,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        },
    }
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _DATASOURCE,
                "expr": expression.replace("{S}", f"{{{_SELECTOR}}}"),
                "legendFormat": legend,
            }
            for number, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def _datasource_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
    }


def _variable(label: str) -> dict[str, Any]:
    selector = "" if label == "job" else 'job=~"$job"'
    query = f"label_values(cog_triton_ready{{{selector}}}, {label})"
    return {
        "name": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": label},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    DASHBOARD.write_text(text(), "utf-8")
