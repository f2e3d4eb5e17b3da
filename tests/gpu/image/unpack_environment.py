"""Unpack the environment of a kit of scripts/pack-gpu, with what this machine has of it already.

python unpack_environment.py ROOT SITE

ROOT has what the kit's parts held. Needs Python 3.12, and nothing besides.
"""

from __future__ import annotations

import json
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import installed_files


def main(root: Path, site: Path, places: Iterable[str] = installed_files.PLACES) -> None:
    """Unpack, and put the files that were not carried where they belong."""
    for wheel in (root / "tools").glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(root / "tools")
    sys.path.insert(0, str(root / "tools"))
    from backports import zstd

    held = json.loads((root / "held.json").read_text("utf-8"))
    wanted = [(row["of"], row.get("of_size", row["size"])) for row in held]
    there = installed_files.find(wanted, places)
    if lacking := [row["name"] for row in held if row["of"] not in there]:
        raise SystemExit(
            f"unpack_environment: this machine lacks what {', '.join(lacking)} is made of"
        )
    options = {zstd.DecompressionParameter.window_log_max: 27}
    with (
        zstd.ZstdFile(root / "environment.tar.zst", "rb", options=options) as plain,
        tarfile.open(fileobj=plain, mode="r|") as archive,
    ):
        archive.extractall(site, filter="tar")
    for row in held:
        path, source = site / row["name"], there[row["of"]]
        path.parent.mkdir(parents=True, exist_ok=True)
        if row["delta"]:
            path.write_bytes(installed_files.restored(root / row["delta"], source))
        else:
            path.symlink_to(source)
    print(f"{len(held)} files are this machine's own")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
