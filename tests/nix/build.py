"""Build one image of the flake from the stand-ins, for a machine that cannot reach nixpkgs' cache.

python tests/nix/build.py NAME LINK [DIRECTORY]

Its base is this machine's Python and C library: for trying and measuring, not for use elsewhere.
DIRECTORY (.work/image) keeps the downloaded wheels.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import factory


def main(name: str, link: str, directory: str = ".work/image") -> None:
    """Build it, and leave a link to it that Nix's garbage collection respects."""
    work = Path(directory).resolve()
    work.mkdir(parents=True, exist_ok=True)
    groups = ["cog", "cpu", *["vllm"] * ("vllm" in name)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=work) as place:
        (work / "wheels").mkdir(exist_ok=True)
        (Path(place) / "wheels").symlink_to(work / "wheels")
        made = factory.Factory(Path(place), groups)
        print(f"wheels in the store after {time.monotonic() - began:.0f} s", flush=True)
        made.nix("build", "--out-link", link, made.attribute(name))
    print(f"{link}: built in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
