"""Small LLM API engine directories, and the environment with the double of TensorRT-LLM."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

from tests.vllm_engines import DOUBLES, hugging_face


def llmapi_engine(directory: Path, **arguments: Any) -> Path:
    """A Hugging Face directory with ``llmapi.yaml``."""
    hugging_face(directory)
    (directory / "llmapi.yaml").write_text(yaml.safe_dump(arguments), "utf-8")
    return directory


def double_environment(journal: Path, **values: str) -> dict[str, str]:
    """Environment in which ``import tensorrt_llm`` finds the double."""
    path = os.pathsep.join([str(DOUBLES), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "TRTLLM_DOUBLE_JOURNAL": str(journal), **values}


def calls(journal: Path, name: str) -> list[dict[str, Any]]:
    """Calls of one name in the double's journal."""
    lines = journal.read_text("utf-8").splitlines() if journal.exists() else []
    return [call for call in map(json.loads, lines) if call["call"] == name]
