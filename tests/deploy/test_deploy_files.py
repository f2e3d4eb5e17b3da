"""The file of deploy/ for Docker Compose."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from chart_rendering import ROOT

COMPOSE = ROOT / "deploy" / "compose.yaml"
_GIVEN = {"IMAGE": "cog-triton-runner-cpu:1", "MODEL": "/home/me/model"}
_VARIABLE = re.compile(r"\$\{(\w+):\?[^}]*\}")


def compose(text: str) -> Any:
    """A Compose file as the Compose specification reads it; raises where it does not."""
    from compose_spec import PyCompose

    given = _VARIABLE.sub(lambda found: _GIVEN[found[1]], text)
    # Its own reader of YAML knows no merge keys.
    return PyCompose.from_json(json.dumps(yaml.safe_load(given))).to_dict()


def test_compose_takes_the_file() -> None:
    services = compose(COMPOSE.read_text())["services"]
    assert services.keys() == {"gpu", "cpu"}
    assert "deploy" not in services["cpu"]
    for name, service in services.items():
        assert service["profiles"] == [name]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert service["read_only"] is True


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("shm_size: 16gb", "shm_sise: 16gb"),
        ("read_only: true", "read_only: maybe"),
        ("interval: 10s", "interval: often"),
        ("profiles: [gpu]", "profile: [gpu]"),
        ("count: 1", "count: one"),
    ],
)
def test_compose_refuses_a_wrong_field(right: str, wrong: str) -> None:
    text = COMPOSE.read_text()
    assert right in text
    with pytest.raises(ValueError):
        compose(text.replace(right, wrong, 1))
