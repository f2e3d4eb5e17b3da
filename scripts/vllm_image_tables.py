"""Tables of docs/image-contents.md: what the vLLM images lack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NIX = Path(__file__).parents[1] / "nix"


def _read(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((NIX / name).read_text("utf-8"))
    return read


def _table(titles: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows)]
    return "\n".join(lines) + "\n"


def left_out() -> str:
    """Wheels that vLLM asks for and the images do without, with the reason."""
    rows = [
        [", ".join(row["wheels"]), row["reason"]] for row in _read("vllm-image.json")["left_out"]
    ]
    return _table(["wheels", "why"], rows)


def dropped() -> str:
    """Files of the wheels that the images do without, with the reason, and those that have them."""
    rows = []
    for row in _read("vllm-image.json")["dropped"]:
        kept = ", ".join(f"sm_{sm}" for sm in row.get("kept_for", []))
        rows.append([", ".join(f"`{path}`" for path in row["paths"]), row["reason"], kept])
    return _table(["files", "why", "kept in"], rows)
