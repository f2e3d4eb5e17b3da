"""Parts of a kit: one stream of bytes in files small enough to be carried, and their checksums."""

from __future__ import annotations

import hashlib
import shutil
from argparse import ArgumentParser
from pathlib import Path
from typing import IO

SUMS = "SHA256SUMS"


class Parts:
    """A file that is written to as one, and lies in parts of `size` bytes."""

    def __init__(self, directory: Path, size: int) -> None:
        self._directory, self._size = directory, size
        self._file: IO[bytes] | None = None
        self._room = 0
        self.paths: list[Path] = []

    def write(self, data: bytes) -> int:
        left = memoryview(data)
        while left:
            if self._file is None or not self._room:
                self.close()
                self.paths.append(self._directory / f"part-{len(self.paths):03}")
                self._file, self._room = self.paths[-1].open("wb"), self._size
            self._file.write(left[: self._room])
            written = min(len(left), self._room)
            self._room -= written
            left = left[written:]
        return len(data)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def add_arguments(parser: ArgumentParser) -> None:
    """Where the parts go, and their size."""
    parser.add_argument("output", type=Path)
    parser.add_argument("--part-size", type=int, default=58, help="MiB of each part")


def emptied(parser: ArgumentParser, output: Path, part_size: int) -> Path:
    """`output` without an earlier kit; ends with an error rather than delete other files."""
    if part_size < 1:
        parser.error(f"--part-size {part_size}: must be at least 1")
    made_before = (output / SUMS).is_file()
    if output.is_file() or (any(output.glob("*")) and not made_before):
        parser.error(f"{output}: is or has other files, which would be deleted")
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    return output


def write_sums(directory: Path, paths: list[Path]) -> None:
    """Write the checksums of `paths`, as sha256sum reads them, and print how much it is."""
    lines = []
    for path in paths:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        lines.append(f"{digest.hexdigest()}  {path.relative_to(directory)}\n")
    (directory / SUMS).write_text("".join(lines))
    total = sum(path.stat().st_size for path in paths)
    print(f"{len(paths)} parts, {total / 1e6:.0f} MB, in {directory}")
