"""Shipped configs pass all checks; broken ones are reported with place and rule."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema_rs
import pytest
import yaml

from cog_triton.builder import config as sealed_config
from cog_triton.builder.checks import check_arguments
from cog_triton.builder.config import load_config, parse_config
from cog_triton.builder.translate import planned
from cog_triton.errors import CogTritonError

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs" / "build").glob("*.yaml"))
SCHEMA = jsonschema_rs.validator_for(json.loads(sealed_config.json_schema()))


def check(text: str, work_dir: Path) -> list[str]:
    lines: list[str] = []
    config = parse_config(text, "c.yaml")
    plan = planned(config, lines.append)
    check_arguments(plan.steps, lines.append)
    return lines


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_config_passes_the_check(path: Path, tmp_path: Path) -> None:
    text = path.read_text("utf-8")
    SCHEMA.validate(yaml.safe_load(text))
    assert f"configs/build/{path.name}" in text, "says how it is built"
    if isinstance(sealed_config.parse_any(text, path.name), sealed_config.SealedConfig):
        return
    lines = check(text, tmp_path)
    assert lines
    assert all(": OK: " in line for line in lines), lines
    before = "model"
    for name, step in load_config(path).steps():
        assert {before, step.output_dir} <= {*map(str, step.args.values())}, name
        before = step.output_dir


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_config_names_its_gpus(path: Path) -> None:
    head = path.read_text("utf-8").partition("\nmodel_id:")[0]
    config = sealed_config.load_any(path)
    if getattr(config, "example_name", None) == "openvino":
        assert "CPU" in head
        return
    named = re.search(r"(\d)gpu", path.stem)
    ranks = int(named[1]) if named else 1
    assert f"; {ranks} GPU" in head
    assert re.search(r"\bSM (80|86|89|90)\b", head)
    if isinstance(config, sealed_config.SealedConfig):
        assert config.args.get("tensor_parallel_size", 1) == ranks
        return
    assert (config.world_size or 1) == ranks
    quantized_to_fp8 = "qformat: fp8" in path.read_text("utf-8")
    assert not (quantized_to_fp8 and re.search(r"\bSM 8[06]\b", head)), "it has no FP8"


def test_committed_schema_is_current() -> None:
    written = (ROOT / "configs" / "build.schema.json").read_text("utf-8")
    assert written == sealed_config.json_schema() + "\n"


BROKEN = yaml.safe_load((Path(__file__).parent / "broken_configs.yaml").read_text("utf-8"))


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: f"{case['code']} {case['new'].strip()}")
def test_broken_config_is_reported_with_place_and_rule(
    case: dict[str, str], tmp_path: Path
) -> None:
    text = (ROOT / "configs" / "build" / f"{case['config']}.yaml").read_text("utf-8")
    assert case["old"] in text
    with pytest.raises(CogTritonError) as caught:
        check(text.replace(case["old"], case["new"], 1), tmp_path)
    assert caught.value.code == case["code"]
    assert case["says"] in str(caught.value)
