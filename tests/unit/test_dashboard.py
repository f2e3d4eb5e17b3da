"""The Grafana dashboard, alerts and autoscaling: each metric that they name is exported."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm"
PANELS = json.loads((CHART / "dashboards" / "cog-triton.json").read_text("utf-8"))["panels"]
FILES = {
    "dashboard": "\n".join(t["expr"] for panel in PANELS for t in panel.get("targets", ())),
    "alerts": (CHART / "templates" / "prometheusrule.yaml").read_text("utf-8"),
    "autoscaling": (CHART / "templates" / "scaledobject.yaml").read_text("utf-8"),
}


@pytest.mark.parametrize("file", FILES)
def test_each_metric_is_exported(file: str) -> None:
    stored = (ROOT / "tests" / "surface.txt").read_text("utf-8")
    exported = set(re.findall(r"^metric openai (\S+)$", stored, re.MULTILINE))
    # The mock has no KV cache, and nothing was refused.
    page = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    found = re.findall(r"`((?:prefix_cache|door)_\w+)[`{]", page)
    exported |= {f"cog_triton_{name}" for name in found}
    named = set(re.findall(r"\b(?:cog_triton|process|python)_\w+(?=\{)", FILES[file]))
    assert named
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in named} <= exported


def test_each_panel_shows_the_chosen_servers_and_says_what() -> None:
    expressions = FILES["dashboard"]
    selected = expressions.count('{job=~"$job",instance=~"$instance"}')
    assert expressions.count("{") == selected
    for panel in PANELS:
        assert panel["type"] == "row" or panel["description"].endswith(".")
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
