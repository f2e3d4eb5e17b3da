"""Files of a kit that the other machine has, in this version or another: told, not carried."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

LARGE = 1_000_000
"""Bytes of the smallest file that is looked for on the other machine."""
_MOST_SHARE = 0.35


class There:
    """Files that wheels installed on the other machine have, by their path in site-packages."""

    def __init__(self, directory: Path | None) -> None:
        archives = map(zipfile.ZipFile, sorted(directory.glob("*.whl")) if directory else ())
        self._found = {item.filename: (zip_, item) for zip_ in archives for item in zip_.infolist()}

    def read(self, name: str) -> bytes | None:
        """The file's content; None where no wheel has it, or it is small."""
        archive, item = self._found.get(name, (None, None))
        return archive.read(item) if archive and item and item.file_size >= LARGE else None


def difference(name: str, data: bytes, theirs: bytes, directory: Path) -> dict[str, Any] | None:
    """How to make `data` of `theirs`: a row for `restored` of tests/gpu/image/installed_files.py.

    A difference is written to DIRECTORY/SHA256. None where it would save too little.
    """
    digest = hashlib.sha256(data).hexdigest()
    row = {"name": name, "sha256": digest, "size": len(data), "delta": "", "of": digest}
    if data == theirs:
        return row
    new, old, delta = directory / "new", directory / "old", directory / digest
    new.write_bytes(data)
    old.write_bytes(theirs)
    command = ["zstd", "--quiet", "--force", "-10", "--long=30", f"--patch-from={old}"]
    subprocess.run([*command, str(new), "-o", str(delta)], check=True)
    new.unlink()
    old.unlink()
    if delta.stat().st_size > len(data) * _MOST_SHARE:
        delta.unlink()
        return None
    of = hashlib.sha256(theirs).hexdigest()
    return row | {"delta": f"deltas/{digest}", "of": of, "of_size": len(theirs)}
