"""Fields of the templates, and those in which rendered repositories of three engines differ.

After a change that is meant: UPDATE_GOLDEN=1 pytest tests/unit/test_tensorrt_llm_fields.py, and
read the diff of tests/unit/golden/fields.txt.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorrt_llm_engines
from google.protobuf import text_format
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import model_config_pb2

from cog_triton.triton import model_repository
from cog_triton.triton.serve_config import MODELS, ServeConfig, load_serve_config

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).parent / "golden" / "fields.txt"
CONFIGS = ROOT / "configs" / "serve"
TEMPLATES = ROOT / "triton_model_repo"
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "defaults": (tensorrt_llm_engines.V1, None),
    "tuned": (tensorrt_llm_engines.V1, "tensorrt-llm.yaml"),
    "v0.9": (tensorrt_llm_engines.V0_9, "tensorrt-llm-0.9.yaml"),
}


def read(repository: Path, model: str) -> dict[str, Any]:
    text = (repository / model / "config.pbtxt").read_text("utf-8")
    parsed = text_format.Parse(text, model_config_pb2.ModelConfig())
    found: dict[str, Any] = MessageToDict(parsed, preserving_proto_field_name=True)
    return found


def fields(repository: Path, model: str) -> dict[str, object]:
    """The fields of a config by their paths; those of tensors and parameters by their names."""
    return dict(flat(read(repository, model)))


def flat(value: Any, at: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = {str(item.get("name", number)): item for number, item in enumerate(value)}
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            if key not in ("name", "string_value"):
                yield from flat(inner, f"{at}/{key}")
            elif at:
                yield at, inner
    else:
        yield at, value or ""


def differences(case: str, directory: Path) -> Iterator[str]:
    """One line for each field that is not the template's."""
    config, serve = CASES[case]
    opened = tensorrt_llm_engines.family(directory / "engine", config)
    settings = load_serve_config(CONFIGS / serve) if serve else ServeConfig()
    model_repository.render_repository(opened, settings, directory / "repo")
    for model in MODELS:
        template = fields(TEMPLATES, model)
        rendered = fields(directory / "repo", model)
        for path in sorted(template.keys() | rendered.keys()):
            owner = path.rpartition("/")[0]
            if owner in template and owner not in rendered:
                continue  # with its tensor
            if template.get(path) != rendered.get(path):
                value = str(rendered.get(path, "(removed)"))
                yield f"{case} {model}{path}: {value.replace(str(directory / 'engine'), '/ENGINE')}"


def templates() -> Iterator[str]:
    """One line for the parameters of each template, its other fields, and each kind of tensor."""
    for model in MODELS:
        config = read(TEMPLATES, model)
        rows: dict[str, list[str]] = {}
        for side in ("input", "output"):
            for tensor in config.pop(side):
                name = tensor.pop("name")
                kind = " ".join(f"{key}={value}" for key, value in sorted(tensor.items()))
                rows.setdefault(f"{side} {kind}", []).append(name)
        for path, value in sorted(flat(config)):
            of, _, name = path.rpartition("parameters/")
            row = "parameters" if of else "fields"
            rows.setdefault(row, []).append(f"{name}={value}")
        for row, items in rows.items():
            yield f"template {model} {row}: {' '.join(items)}"


@pytest.mark.parametrize("case", ["template", *CASES])
def test_fields_of_templates_and_what_rendering_sets(case: str, tmp_path: Path) -> None:
    stored = TABLE.read_text("utf-8").splitlines() if TABLE.exists() else []
    found = list(differences(case, tmp_path) if case in CASES else templates())
    if os.environ.get("UPDATE_GOLDEN"):
        others = [line for line in stored if not line.startswith(f"{case} ")]
        TABLE.write_text("\n".join(sorted([*others, *found])) + "\n", "utf-8")
        return
    assert sorted(found) == [line for line in stored if line.startswith(f"{case} ")]
