"""Make one part of an image of wheels: unpack them, leave files out, prune to a GPU, strip.

python wheel_part.py TABLE PART SM SITE WHEEL...

TABLE is vllm-image.json or what of it matters to PART; SM is a number, several with commas between,
or "any" for a part that all images share; SITE must not be there. Prints what was left out, a line
for each reason. The same program makes the layers in Nix and, for comparison, on a machine with a
GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import install_wheels
import strip_symbols


def left_out(table: dict[str, Any], sm: str, site: Path) -> list[tuple[str, list[Path]]]:
    """Files that the image goes without, by reason; a part for any SM keeps what one SM keeps."""
    found = []
    for entry in table["dropped"]:
        kept_for = {str(number) for number in entry.get("kept_for", [])}
        if kept_for and (sm == "any" or kept_for & set(sm.split(","))):
            continue
        paths = matching(entry, site)
        files = {
            file
            for path in paths
            for file in (path.rglob("*") if path.is_dir() and not path.is_symlink() else [path])
        }
        found.append((entry["reason"], sorted(file for file in files if _is_file(file))))
    return found


def matching(entry: dict[str, Any], site: Path) -> set[Path]:
    """Paths that an entry of the table names."""
    return {path for pattern in entry["paths"] for path in site.glob(pattern)}


def _is_file(path: Path) -> bool:
    return path.is_symlink() or not path.is_dir()


def remove(files: list[Path], site: Path) -> int:
    """Remove the files, and directories that they leave empty; returns their size in bytes."""
    freed = 0
    for file in files:
        if not file.is_symlink() and not file.exists():
            continue  # another entry's, too
        freed += file.lstat().st_size
        file.unlink()
        for parent in file.parents:
            if parent == site or any(parent.iterdir()):
                break
            parent.rmdir()
    return freed


def main(arguments: list[str]) -> None:
    """Make the part; see above."""
    source, name, sm, target, *wheels = arguments
    table = json.loads(Path(source).read_text("utf-8"))
    (part,) = (part for part in table["parts"] if part["name"] == name)
    site = Path(target)
    install_wheels.main(site, [Path(wheel) for wheel in wheels])
    for reason, files in left_out(table, sm, site):
        if files:
            print(f"left out {remove(files, site):>12,} bytes in {len(files):>5} files: {reason}")
    if part.get("pruned") and sm != "any":
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "cog_triton_prune", "--sm", sm, str(site)]
        subprocess.run(command, check=True, env=environment)
    for entry in table["stripped"]:
        strip_symbols.main(sorted(matching(entry, site)))


if __name__ == "__main__":
    main(sys.argv[1:])
