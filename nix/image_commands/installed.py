"""Packages found in the trees of an image's layers: Python distributions and Debian packages."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path


@dataclass(frozen=True)
class Distribution:
    """Python distribution: its METADATA, and where that is in the image."""

    name: str
    version: str
    path: str
    metadata: Message


@dataclass(frozen=True)
class DebianPackage:
    """Installed package of a Debian or Ubuntu system."""

    name: str
    version: str
    architecture: str
    system: str
    """ID of os-release: ``debian`` or ``ubuntu``."""


def canonical(name: str) -> str:
    """Return a distribution's name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def distributions(tree: Path) -> Iterator[Distribution]:
    """Yield the distributions of a store path, in order of their paths."""
    for directory, names, _ in os.walk(tree):
        names.sort()
        for name in [name for name in names if name.endswith(".dist-info")]:
            names.remove(name)
            file = Path(directory, name, "METADATA")
            if file.is_file():
                metadata = HeaderParser().parsestr(file.read_text("utf-8", errors="replace"))
                place = str(file.parent.relative_to(tree))
                yield Distribution(
                    canonical(metadata["Name"]), metadata["Version"], place, metadata
                )


def debian_packages(tree: Path) -> Iterator[DebianPackage]:
    """Yield the packages that dpkg's status of a store path says are installed."""
    status = tree / "var/lib/dpkg/status"
    if not status.is_file():
        return
    system = _system(tree)
    for stanza in re.split(r"\n\n+", status.read_text("utf-8", errors="replace").strip()):
        fields = HeaderParser().parsestr(stanza)
        if fields["Package"] and str(fields["Status"]).endswith(" installed"):
            yield DebianPackage(
                fields["Package"], fields["Version"], fields["Architecture"], system
            )


def _system(tree: Path) -> str:
    for name in ("etc/os-release", "usr/lib/os-release"):
        file = tree / name
        if file.is_file() and (found := re.search(r'^ID="?(\w+)', file.read_text(), re.MULTILINE)):
            return found[1]
    return "debian"
