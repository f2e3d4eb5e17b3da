"""Take parts of a kit of scripts/pack-image, and unpack them in the background as they come.

    scripts/setup-image CARRIED [--root ROOT]

CARRIED has some of the kit's files, the first time with SHA256SUMS and held.json. Says which parts
are still to come. The first time it also says what this machine is, and which files under extra/
must come, because it does not have them. With ROOT/assembled.json all is done. Needs Python 3.12.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import driver_files
import installed_files
from receive import Kit

_HERE = Path(__file__).resolve().parent
_REPOSITORY = _HERE.parents[2]


def probe(kit: Kit) -> dict[str, Any]:
    """What this machine is; `extra` is what must be carried because it is not here."""
    wanted = json.loads((kit.directory / "held.json").read_text("utf-8"))
    there = installed_files.find((row["of"], row.get("of_size", row["size"])) for row in wanted)
    lacking = {row["sha256"] for row in wanted if row["of"] not in there}
    pieces = [name for name in kit.sums() if Path(name).name.rpartition("-")[0] in lacking]
    namespaces = ["unshare", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "x", "/mnt"]
    return {
        "gpu": _said(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]),
        "python": sys.version,
        "disk_gb": shutil.disk_usage(kit.directory).free // 10**9,
        "cores": os.cpu_count(),
        "namespaces": _said([*namespaces]) or "ok",
        "driver_files": [str(path) for path in driver_files.libraries()],
        "devices": [str(path) for path in driver_files.devices()],
        "found": f"{len(wanted) - len(lacking)} of {len(wanted)} files that were not carried",
        "extra": sorted(pieces),
    }


def _said(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except OSError as error:
        return str(error)
    return (done.stdout + done.stderr).strip()[-400:]


def unpacking(root: Path) -> bool:
    """Whether a process unpacks there."""
    try:
        pid = int((root / "unpack.pid").read_text())
        return b"unpack.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return False


def main() -> int:
    """Take, probe once, unpack; 1 where a part is damaged."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("carried", type=Path)
    parser.add_argument("--root", type=Path, default=Path("/root/image"))
    options = parser.parse_args()
    root: Path = options.root
    kit = Kit(root / "kit")
    wrong = kit.take(options.carried)
    for name in wrong:
        print(f"DAMAGED, carry it again: {name}")
    if not (root / "probe.json").is_file():
        shutil.copy(options.carried / "held.json", kit.directory)
        # Between two calls the repository here may be sent again, while parts are being made.
        for name in ("nix", "cog_triton", "cog_triton_prune"):
            shutil.copytree(_REPOSITORY / name, root / "source" / name, dirs_exist_ok=True)
        found = json.dumps(probe(kit), indent=1)
        (root / "probe.json").write_text(found, "utf-8")
        print(found)
    extra = json.loads((root / "probe.json").read_text("utf-8"))["extra"]
    if lacking := [name for name in extra if not (kit.directory / name).is_file()]:
        print(f"first carry what this machine lacks: {' '.join(lacking)}")
    elif not unpacking(root) and not (root / "assembled.json").is_file():
        with (root / "unpack.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, str(_HERE / "unpack.py"), str(root)],
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        (root / "unpack.pid").write_text(str(process.pid))
    missing = kit.missing()
    shown = (
        f"{len(missing)} parts are to come: {' '.join(missing)}" if missing else "all parts came"
    )
    print(shown)
    if (root / "unpack.log").is_file():
        print("".join(f"  {line}\n" for line in _tail(root / "unpack.log")), end="")
    return 1 if wrong else 0


def _tail(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines()[-6:]


if __name__ == "__main__":
    sys.exit(main())
