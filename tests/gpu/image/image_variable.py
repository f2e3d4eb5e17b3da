"""Print the places in /nix that a variable of an image names: python image_variable.py ROOT NAME.

The others are this machine's, whose libraries are for another C library than the image's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(root: Path, name: str) -> None:
    """Print them, with colons between."""
    about = json.loads((root / "image.json").read_text("utf-8"))["image"]
    value = dict(item.split("=", 1) for item in about["config"]["Env"]).get(name, "")
    print(":".join(place for place in value.split(":") if place.startswith("/nix/")))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
