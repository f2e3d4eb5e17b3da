"""Files of this machine's own packages, by their content: what a kit leaves out is found here."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from digests import sha256

PLACES = ("/opt", "/usr/local", "/usr/lib/python3", sys.prefix, sys.base_prefix)


def find(wanted: Iterable[tuple[str, int]], places: Iterable[str] = PLACES) -> dict[str, Path]:
    """Path by SHA-256 for those of `wanted`, (SHA-256, size), that are below `places`."""
    digests: defaultdict[int, set[str]] = defaultdict(set)
    for digest, size in wanted:
        digests[size].add(digest)
    candidates = [path for path, size in _files(places) if size in digests]
    found: dict[str, Path] = {}
    with ThreadPoolExecutor() as threads:
        for path, digest in zip(candidates, threads.map(sha256, candidates), strict=True):
            if digest in digests[path.stat().st_size]:
                found.setdefault(digest, path)
    return found


def restored(delta: Path, theirs: Path) -> bytes:
    """The file that `delta` (zstd --patch-from) makes of `theirs`; needs backports.zstd."""
    from backports import zstd

    options = {zstd.DecompressionParameter.window_log_max: 31}
    old = zstd.ZstdDict(theirs.read_bytes(), is_raw=True).as_prefix
    return bytes(zstd.decompress(delta.read_bytes(), zstd_dict=old, options=options))


def _files(places: Iterable[str]) -> Iterator[tuple[Path, int]]:
    seen = set()
    for place in places:
        for directory, _, names in os.walk(place):
            for name in names:
                path = Path(directory, name)
                try:
                    status = path.lstat()
                except OSError:
                    continue
                if not path.is_symlink() and status.st_ino not in seen:
                    seen.add(status.st_ino)
                    yield path, status.st_size
