"""Print a variable of an image's environment: python image_variable.py ROOT NAME."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(root: Path, name: str) -> None:
    """Print it; nothing where there is none."""
    about = json.loads((root / "image.json").read_text("utf-8"))["image"]
    print(dict(item.split("=", 1) for item in about["config"]["Env"]).get(name, ""))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
