"""Find shared objects of an environment that need a library which is not in it.

python needed_libraries.py SITE...

The C library, the C++ and zlib run times come from the base layer, libcuda.so.1 from the driver.
Prints a line for each library that is missing; the exit code is 1 then. That a library is in SITE
does not mean that the loader finds it: for that, it has to be imported.
"""

from __future__ import annotations

import mmap
import re
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

_ELSEWHERE = re.compile(
    r"(ld-linux-x86-64|lib(c|m|dl|pthread|rt|util|resolv|stdc\+\+|gcc_s|z|cuda))\.so\.\d+"
)
_LOAD, _DYNAMIC = 1, 2
_NEEDED, _STRINGS, _NAME = 1, 5, 14


def dynamic_names(data: bytes | mmap.mmap) -> tuple[str | None, list[str]]:
    """A shared object's own name and those of the libraries it needs; none for other files."""
    if data[:6] != b"\x7fELF\x02\x01":
        return None, []
    (offset,), (size, count) = (
        struct.unpack_from("<Q", data, 32),
        struct.unpack_from("<HH", data, 54),
    )
    segments = [struct.unpack_from("<IIQQQQQQ", data, offset + i * size) for i in range(count)]
    entries = [
        entry
        for kind, _, start, _, _, length, *_ in segments
        if kind == _DYNAMIC
        for entry in struct.iter_unpack("<qQ", data[start : start + length // 16 * 16])
    ]
    values = defaultdict(list)
    for tag, value in entries:
        values[tag].append(value)
    if not values[_STRINGS]:
        return None, []
    address = values[_STRINGS][0]
    table = next(
        start + address - begin
        for kind, _, start, begin, _, length, *_ in segments
        if kind == _LOAD and begin <= address < begin + length
    )

    def text(at: int) -> str:
        return data[table + at : data.find(b"\0", table + at)].decode()

    name = next(map(text, values[_NAME]), None)
    return name, [text(at) for at in values[_NEEDED]]


def missing(sites: list[Path]) -> dict[str, list[Path]]:
    """Libraries that are in none of the directories, and the files that need them."""
    present: set[str] = set()
    needed: dict[str, list[Path]] = defaultdict(list)
    for path in _shared_objects(sites):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            name, names = dynamic_names(data)
        present |= {path.name, name or path.name}
        for library in names:
            needed[library].append(path)
    return {
        library: sorted(paths)
        for library, paths in sorted(needed.items())
        if library not in present and not _ELSEWHERE.fullmatch(library)
    }


def _shared_objects(sites: list[Path]) -> Iterator[Path]:
    for site in sites:
        for path in site.rglob("*.so*"):
            if path.is_file() and not path.is_symlink() and path.stat().st_size:
                yield path


def main(sites: list[Path]) -> int:
    """Command line."""
    found = missing(sites)
    for library, paths in found.items():
        print(f"{library}: needed by {', '.join(map(str, paths))}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main([Path(name) for name in sys.argv[1:]]))
