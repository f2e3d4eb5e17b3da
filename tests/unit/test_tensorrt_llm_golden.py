"""Golden files: the rendered repositories of three engines.

After an intended change: UPDATE_GOLDEN=1 pytest tests/unit/test_tensorrt_llm_golden.py, and
read the diff of tests/unit/golden/.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import tensorrt_llm_engines
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from cog_triton.triton import model_repository
from cog_triton.triton.serve_config import MODELS, ServeConfig, load_serve_config

GOLDEN = Path(__file__).parent / "golden"
CONFIGS = Path(__file__).parents[2] / "configs" / "serve"
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "defaults": (tensorrt_llm_engines.V1, None),
    "tuned": (tensorrt_llm_engines.V1, "tensorrt-llm.yaml"),
    "v0.9": (tensorrt_llm_engines.V0_9, "tensorrt-llm-0.9.yaml"),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_rendered_config_matches_the_golden_file(case: str, model: str, tmp_path: Path) -> None:
    config, serve = CASES[case]
    opened = tensorrt_llm_engines.family(tmp_path / "engine", config)
    target = tmp_path / "repo"
    settings = load_serve_config(CONFIGS / serve) if serve else ServeConfig()
    model_repository.render_repository(opened, settings, target)
    text = (target / model / "config.pbtxt").read_text("utf-8")
    text = text.replace(str(tmp_path / "engine"), "/ENGINE")
    assert "${" not in text
    text_format.Parse(text, model_config_pb2.ModelConfig())
    golden = GOLDEN / case / f"{model}.pbtxt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(text, "utf-8")
    assert text == golden.read_text("utf-8")


def test_every_golden_file_is_used() -> None:
    held = {path.relative_to(GOLDEN).as_posix() for path in GOLDEN.rglob("*.pbtxt")}
    assert held == {f"{case}/{model}.pbtxt" for case in CASES for model in MODELS}
