"""Tables of docs/image-contents.md: what the vLLM images weigh, and what they go without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NIX = Path(__file__).parents[1] / "nix"
LARGEST = 15
BASES = {
    "nixpkgs": "Built by the flake as it is, on nixpkgs.",
    "this machine's Python and libraries": (
        "Built with `--stand-ins`: `base` is a look-alike of nixpkgs' that is made of the build"
        " machine's own Python\nand C library, so these are not the flake's images. The other"
        " layers are the same files on either."
    ),
}
"""What "base" of nix/vllm-sizes.json means for the reader."""


def _read(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((NIX / name).read_text("utf-8"))
    return read


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f}"


def _table(titles: list[str], rows: list[list[str]], numbers: bool = False) -> str:
    under = ["---", *["--:" if numbers else "---"] * (len(titles) - 1)]
    lines = [f"| {' | '.join(row)} |" for row in (titles, under, *rows)]
    return "\n".join(lines) + "\n"


def sizes() -> str:
    """MB of each layer under zstd -9, one column a GPU architecture, and what they are unpacked."""
    found = _read("vllm-sizes.json")
    if not found.get("images"):
        return "Not recorded of what the images hold now: `scripts/vllm_image_sizes.py` does.\n"
    images = dict(sorted(found["images"].items(), key=lambda item: int(item[0])))
    names = list(next(iter(images.values())))
    parts = [part["name"] for part in _read("vllm-image.json")["parts"]]
    order = ["base", "triton", *parts, "wheels", "licences", "source"]
    rows = [
        [name, *(_megabytes(image[name]["zstd"]) for image in images.values())]
        for name in sorted(names, key=order.index)
    ]
    for title, key in (("**image**", "zstd"), ("unpacked", "bytes")):
        sums = (sum(layer[key] for layer in image.values()) for image in images.values())
        rows.append([title, *map(_megabytes, sums)])
    table = _table(["MB", *(f"sm_{sm}" for sm in images)], rows, numbers=True)
    return f"{BASES[found['base']]}\n\n{table}"


def wheels() -> str:
    """The largest wheels before anything is pruned or left out of them, and the sum of all."""
    found = _read("vllm-sizes.json")["wheels"]
    ranked = sorted(found.items(), key=lambda item: item[1]["zstd"], reverse=True)
    rows = [
        [" ".join(file.split("-")[:2]), *(_megabytes(size[key]) for key in ("bytes", "zstd"))]
        for file, size in ranked[:LARGEST]
    ]
    for title, some in (
        (f"the other {len(ranked) - LARGEST}", ranked[LARGEST:]),
        (f"**all {len(ranked)}**", ranked),
    ):
        sums = (sum(size[key] for _, size in some) for key in ("bytes", "zstd"))
        rows.append([title, *map(_megabytes, sums)])
    return _table(["wheel", "MB unpacked", "zstd -9"], rows, numbers=True)


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
