"""Grafana dashboard and autoscaling rules: every metric that they name is one that is exported."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cog_triton.door.access import Refusals
from cog_triton.door.message import Refused
from cog_triton.door.swapping import Swapping
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.request import EngineRequest
from cog_triton.errors import Overloaded, Unauthorized
from cog_triton.serving.generation import GenerationRequest, GenerationResult
from cog_triton.serving.openai import listeners
from cog_triton.serving.openai.listeners import HTTPListeners
from cog_triton.serving.telemetry.energy import EnergyMeter
from cog_triton.serving.telemetry.observers import CompositeObserver
from cog_triton.serving.tenants import Tenant
from cog_triton.settings import Settings
from cog_triton.text.sampling import SamplingParams

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "grafana_dashboard.py"))
PANELS = [panel for panel in SCRIPT["dashboard"]()["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
KEDA = ROOT / "deploy" / "keda.yaml"
ALERTS = ROOT / "deploy" / "helm" / "templates" / "prometheusrule.yaml"
KEEPER = "COG_TRITON_ENGINE_KEEPER_NAME"
UNITS = {"short", "reqps", "s", "watt", "percentunit", "bytes", "bool_yes_no"}
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{")
_LEFT_OUT = {
    "process_virtual_memory_bytes",
    "process_start_time_seconds",
    "process_open_fds",
    "process_max_fds",
    "python_info",
}
"""Metrics that no panel needs."""


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Names of all samples by their family, those of swaps included and of vLLM's names not."""
    runtime: Any = SimpleNamespace(
        admission=SimpleNamespace(running=1, waiting=2),
        supervisor=SimpleNamespace(
            error=None,
            restarts=0,
            planned_restarts=0,
            engines=1,
            engine_memory=lambda: {"leased": 1},
        ),
        step_statistics=SimpleNamespace(lag=1, lost_steps=0),
        energy=EnergyMeter(lambda: 1.0, tuple),
        adapters=None,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listeners, "model_name", lambda runtime: "m")
        telemetry = CompositeObserver(Settings())
        server = HTTPListeners(Settings(), telemetry)
        patch.setattr(server._triton, "kv_cache", lambda: KVCacheStats(0.5, 16, 1024, 9, 3))
        server._register_gauges(runtime)
        request = GenerationRequest(
            engine=EngineRequest(input_ids=[1], sampling=SamplingParams(max_tokens=2)),
            endpoint="chat",
            tenant=Tenant(name="a"),
        )
        result = GenerationResult(
            queue_time=0.1,
            joules=2.0,
            output_token_count=2,
            time_to_first_token=0.2,
            duration=0.4,
            finish_reason="stop",
            arrivals=[(0.2, 1), (0.4, 1)],
            interruptions=2,
            resumptions=[(1, 0.5)],
            obstacle="guide",
        )
        telemetry.ended(request, result, None)
        telemetry.refused("chat", Overloaded("full"))
        telemetry.ended(request, GenerationResult(duration=0.1), Overloaded("full"))
        first = SimpleNamespace(name="m", chain=SimpleNamespace(environment={KEEPER: "k"}))
        upstreams: Any = SimpleNamespace(serving=first)
        launcher: Any = None
        swapping = Swapping(Settings(), upstreams, launcher)
        refusals = Refusals()
        refusals.count(Refused(401, Unauthorized("x")))
        whole = refusals.with_metrics(200, telemetry.metrics.text())
        assert whole is not None
        answer = swapping.with_metrics(200, whole.body)
        assert answer is not None
        text = answer.body.decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        if not family.name.startswith("vllm:") and not family.name.endswith("_created"):
            found[family.name] = {sample.name for sample in family.samples}
    return found


def names_in(expressions: list[str]) -> set[str]:
    names = {name for text in expressions for name in _SELECTOR.findall(text)}
    assert names
    return names


def test_the_file_is_current() -> None:
    """If not: python scripts/grafana_dashboard.py"""
    assert SCRIPT["DASHBOARD"].read_text("utf-8") == SCRIPT["text"]()


def test_every_metric_of_a_panel_is_exported(exported: dict[str, set[str]]) -> None:
    assert names_in(EXPRESSIONS) <= set().union(*exported.values())


def test_every_exported_metric_is_on_a_panel_or_left_out(exported: dict[str, set[str]]) -> None:
    shown = names_in(EXPRESSIONS)
    hidden = {name for name, samples in exported.items() if not samples & shown}
    assert hidden == _LEFT_OUT


def test_every_selector_selects_the_chosen_servers() -> None:
    for expression in EXPRESSIONS:
        assert expression.count("{") == expression.count('{job=~"$job",instance=~"$instance"}')


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_has_a_known_unit_and_says_what_it_shows(panel: dict[str, Any]) -> None:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    assert unit in UNITS or unit.startswith("suffix:")
    assert panel["description"].endswith(".")
    assert all(target["legendFormat"] for target in panel["targets"])


def test_panels_fill_their_rows_and_have_ids_of_their_own() -> None:
    panels = json.loads(SCRIPT["text"]())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) == 24 * (max(y for _, y in cells) + 1)


def test_alerts_are_of_exported_metrics(exported: dict[str, set[str]]) -> None:
    names = names_in([ALERTS.read_text()])
    assert len(names) == 10
    assert names <= set().union(*exported.values())


def test_autoscaling_asks_for_exported_metrics(exported: dict[str, set[str]]) -> None:
    triggers = yaml.safe_load(KEDA.read_text())["spec"]["triggers"]
    queries = [trigger["metadata"]["query"] for trigger in triggers]
    assert names_in(queries) <= set().union(*exported.values())
    for trigger in triggers:
        assert trigger["type"] == "prometheus"
        assert float(trigger["metadata"]["threshold"]) > 0
