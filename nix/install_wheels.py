"""Unpack wheels into one site-packages directory, without their console scripts.

python install_wheels.py SITE WHEEL...
"""

import shutil
import sys
from pathlib import Path

from installer import install
from installer.destinations import SchemeDictionaryDestination
from installer.sources import WheelFile

# Of the scripts, which RECORD has the hashes of: the same wherever this runs.
_INTERPRETER = "/opt/cog-triton/bin/python"


def main(site: Path, wheels: list[Path]) -> None:
    """Install every wheel; what would go beside site-packages is dropped with `aside`.

    RECORD names files from where it is, so `aside` must be in the same place every time.
    """
    site.mkdir(parents=True)
    aside = site / "aside"
    schemes = {name: str(aside / name) for name in ("headers", "scripts", "data")}
    schemes |= {"purelib": str(site), "platlib": str(site)}
    for wheel in sorted(wheels):
        destination = SchemeDictionaryDestination(
            schemes,
            interpreter=_INTERPRETER,
            script_kind="posix",
            bytecode_optimization_levels=(),
        )
        with WheelFile.open(wheel) as source:
            install(source, destination, additional_metadata={"INSTALLER": b"nix\n"})
    shutil.rmtree(aside, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
