#!/usr/bin/env python3
"""Write nix/vllm-sizes.json: what the vLLM images weigh, by layer and GPU architecture.

    python scripts/vllm_image_sizes.py [--stand-ins] [SM...]
    python scripts/vllm_image_sizes.py --wheels DIRECTORY

Builds each image that is named, all without one, and asks it for its sizes; some 6 minutes and
3 GB of disk each. Needs what scripts/image-vllm needs. With --wheels: instead, what each wheel of
the lock weighs before anything is left out of it, the wheels being in DIRECTORY (scripts/wheels.py
downloads them); some 3 minutes. The tables in docs/image-contents.md are made from the file
(scripts/doc_tables.py), and a test refuses it once the images hold something else.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SIZES = ROOT / "nix" / "vllm-sizes.json"
SMS = ("80", "86", "89", "90", "100", "103", "120")
_LINE = re.compile(r" *([\d,]+) +([\d,]+)  (\S+) .*")


def contents() -> str:
    """Fingerprint of what the images hold: wheels, and what is dropped, pruned and stripped."""
    wheels = json.loads((ROOT / "nix" / "vllm-wheels.json").read_text("utf-8"))
    table = json.loads((ROOT / "nix" / "vllm-image.json").read_text("utf-8"))
    held = [wheels, *(_without_reasons(table[key]) for key in ("parts", "dropped", "stripped"))]
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()


def _without_reasons(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in entry.items() if k != "reason"} for entry in entries]


def measure(sm: str, *options: str) -> dict[str, dict[str, int]]:
    """Build the image of one SM; bytes of each layer, unpacked and under zstd -9."""
    link = ROOT / f"result-vllm-{sm}"
    subprocess.run([ROOT / "scripts" / "image-vllm", *options, sm, link], check=True)
    command = [link, "size", "--compressed"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = [match for line in said.splitlines() if (match := _LINE.fullmatch(line))]
    return {
        row[3]: {"bytes": int(row[1].replace(",", "")), "zstd": int(row[2].replace(",", ""))}
        for row in rows
        if row[3] != "total,"
    }


def wheel_sizes(directory: Path) -> dict[str, dict[str, int]]:
    """Bytes of each locked wheel's files, unpacked and as one tar under zstd -9, by file name."""
    (locked,) = json.loads((ROOT / "nix" / "vllm-wheels.json").read_text("utf-8")).values()
    return {wheel["file"]: _weigh(directory / wheel["file"]) for wheel in locked.values()}


def _weigh(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryFile() as compressed:
        command = ["zstd", "-9", "-T0", "--quiet", "--stdout"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=compressed) as zstd:
            with tarfile.open(mode="w|", fileobj=zstd.stdin) as tar:
                for item in archive.infolist():
                    member = tarfile.TarInfo(item.filename)
                    member.size = item.file_size
                    with archive.open(item) as file:
                        tar.addfile(member, file)
            assert zstd.stdin is not None
            zstd.stdin.close()
        if zstd.returncode:
            raise RuntimeError(f"{wheel}: zstd ended with {zstd.returncode}")
        size = sum(item.file_size for item in archive.infolist())
        return {"bytes": size, "zstd": compressed.seek(0, io.SEEK_END)}


def _write(found: dict[str, Any]) -> None:
    SIZES.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", "utf-8")


def main() -> None:
    """Measure, and write the file after each image."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stand-ins", action="store_true", help="as of scripts/image-vllm")
    parser.add_argument("--wheels", type=Path, metavar="DIRECTORY", help="weigh the wheels in it")
    parser.add_argument("sm", nargs="*", help="80, 86, ...")
    given = parser.parse_args()
    known = json.loads(SIZES.read_text("utf-8")) if SIZES.exists() else {}
    if given.wheels:
        _write(known | {"wheels": wheel_sizes(given.wheels)})
        return
    images = known.get("images", {}) if known.get("contents") == contents() else {}
    for sm in given.sm or SMS:
        images[sm] = measure(sm, *["--stand-ins"] * given.stand_ins)
        base = "this machine's Python and libraries" if given.stand_ins else "nixpkgs"
        _write(known | {"contents": contents(), "base": base, "images": images})
        total = sum(layer["zstd"] for layer in images[sm].values())
        print(f"sm_{sm}: {total / 1e9:.3f} GB under zstd -9", flush=True)


if __name__ == "__main__":
    main()
