#!/usr/bin/env python3
"""Print uv's overrides for the lock of the vLLM images: what nix/vllm-image.json says of wheels."""

from __future__ import annotations

import json
from pathlib import Path

TABLE = Path(__file__).resolve().parent.parent / "nix" / "vllm-image.json"


def main() -> None:
    """Print a requirement a line; what is left out is wanted on no platform."""
    table = json.loads(TABLE.read_text("utf-8"))
    for entry in table["overrides"]:
        print("\n".join(entry["requirements"]))
    for entry in table["left_out"]:
        for name in entry["wheels"]:
            print(f"{name} ; sys_platform == 'never'")


if __name__ == "__main__":
    main()
