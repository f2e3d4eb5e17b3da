#!/usr/bin/env python3
"""Known vulnerabilities of what is shipped: locks and SBOMs against OSV's export of PyPI.

    .venv/bin/python scripts/vulnerabilities.py --osv all.zip [--sbom FILE ...]

--osv is the export, a zip of advisories in OSV's format; --sbom adds the Python packages of an
image (`./result sbom`) to those of the locks. requirements/not-affected.yaml has what is known not
to affect us, and why. Exit status: 0 none, 1 some, 2 not looked: a wrong file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import yaml
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements"
SHIPPED = ("python", "vllm")
NOT_AFFECTED = REQUIREMENTS / "not-affected.yaml"
_PURL = re.compile(r"pkg:pypi/([^@]+)@([^?#]+)")


class NotLooked(Exception):
    """Reason for which nothing can be said of vulnerabilities."""


class Finding(NamedTuple):
    """A vulnerability of a version of a package, by all its names."""

    package: str
    version: str
    names: tuple[str, ...]
    summary: str


class Exemption(NamedTuple):
    """A vulnerability that does not affect us: why, and the day until which that is believed."""

    id: str
    package: str
    reason: str
    until: datetime.date


def locked(lock: Path) -> list[tuple[str, str]]:
    """The packages of a lock."""
    pins = re.findall(r"^([\w.-]+)==([^\s\\]+)", lock.read_text("utf-8"), re.MULTILINE)
    return [(canonicalize_name(name), version) for name, version in pins]


def described(sbom: Path) -> list[tuple[str, str]]:
    """The Python packages of an SPDX document."""
    packages = json.loads(sbom.read_text("utf-8"))["packages"]
    places = [each["referenceLocator"] for one in packages for each in one.get("externalRefs", [])]
    found = filter(None, map(_PURL.match, places))
    return [(str(canonicalize_name(unquote(one[1]))), unquote(one[2])) for one in found]


def read_exemptions(path: Path = NOT_AFFECTED) -> list[Exemption]:
    """The table of what does not affect us; every field is required."""
    rows = yaml.safe_load(path.read_text("utf-8")) or []
    for number, row in enumerate(rows, 1):
        if row.keys() != set(Exemption._fields) or type(row["until"]) is not datetime.date:
            fields = ", ".join(Exemption._fields)
            raise NotLooked(f"{path}: entry {number}: must have {fields}, until being a date")
    return [Exemption(**row | {"package": canonicalize_name(row["package"])}) for row in rows]


def findings(packages: set[tuple[str, str]], export: Path) -> list[Finding]:
    """What an export of OSV has on `packages`; raises `NotLooked` if it has none on Python's."""
    found, known = set(), 0
    with zipfile.ZipFile(export) as archive:
        for name in archive.namelist():
            advisory = json.loads(archive.read(name))
            names = (advisory["id"], *advisory.get("aliases", []))
            for affected in advisory.get("affected", []):
                package = affected.get("package", {})
                if package.get("ecosystem") != "PyPI":
                    continue
                known += 1
                mine = canonicalize_name(package["name"])
                for one, version in packages:
                    if one == mine and not advisory.get("withdrawn") and is_in(affected, version):
                        found.add(Finding(one, version, names, str(advisory.get("summary", ""))))
    if not known:
        raise NotLooked(f"{export}: has no advisory on a package of PyPI")
    return sorted(found)


def is_in(affected: Mapping[str, Any], version: str) -> bool:
    """Whether OSV's entry of a package names a version, or has it in a range.

    Events apply in order of their versions, and the last one decides. A version that PEP 440 does
    not know applies to none: OSV lists such ones in `versions`.
    """
    if version in affected.get("versions", []):
        return True
    at = Version(version)
    for one in affected.get("ranges", []):
        inside = False
        for event, kind in sorted(_events(one)) if one.get("type") == "ECOSYSTEM" else ():
            if kind == "introduced" and at >= event:
                inside = True
            elif (kind == "fixed" and at >= event) or (kind == "last_affected" and at > event):
                inside = False
        if inside:
            return True
    return False


def _events(one: Mapping[str, Any]) -> Iterator[tuple[Version, str]]:
    for event in one.get("events", []):
        for kind, text in event.items():
            try:
                yield Version("0.dev0" if text == "0" else text), kind
            except InvalidVersion:
                continue


def judge(
    found: Sequence[Finding], exemptions: Sequence[Exemption], today: datetime.date
) -> tuple[list[Finding], list[str]]:
    """The findings that stand, and notes on those that do not and on rows that are out of use."""
    standing, notes, used = [], [], set()
    for one in found:
        rows = [row for row in exemptions if row.package == one.package and row.id in one.names]
        used.update(rows)
        if valid := [row for row in rows if row.until >= today]:
            notes.append(f"{one.package}: {one.names[0]}: not affected: {valid[0].reason.strip()}")
            continue
        notes += [f"{row.id}: believed until {row.until} only: look again" for row in rows]
        standing.append(one)
    notes += [
        f"{row.id}: in {NOT_AFFECTED.name}, not found" for row in exemptions if row not in used
    ]
    return standing, notes


def table(path: Path = NOT_AFFECTED) -> str:
    """The table of docs/supply-chain.md."""
    rows = [f"| {' | '.join(map(str, row)).strip()} |" for row in read_exemptions(path)]
    head = ["| vulnerability | package | why it does not affect us | believed until |"]
    return "\n".join([*head, "|---|---|---|---|", *(rows or ["| none | | | |"])]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Look for vulnerabilities, and print them; returns the exit status."""
    parser = argparse.ArgumentParser(description="Known vulnerabilities of what is shipped.")
    parser.add_argument("--osv", type=Path, required=True, metavar="FILE", help="OSV's all.zip")
    parser.add_argument("--sbom", type=Path, action="append", default=[], metavar="FILE")
    given = parser.parse_args(arguments)
    try:
        packages = {one for lock in SHIPPED for one in locked(REQUIREMENTS / f"{lock}.lock")}
        packages |= {one for sbom in given.sbom for one in described(sbom)}
        found = findings(packages, given.osv)
        standing, notes = judge(found, read_exemptions(), datetime.date.today())
    except (NotLooked, OSError, zipfile.BadZipFile, LookupError, TypeError, ValueError) as error:
        print(f"vulnerabilities: not looked: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(*notes, sep="\n", end="\n" if notes else "")
    for one in standing:
        print(f"VULNERABLE: {one.package} {one.version}: {', '.join(one.names)}\n  {one.summary}")
    print(f"{len(packages)} packages against {given.osv.name}: {len(standing)} vulnerabilities")
    if standing:
        print(f"Raise their versions, or say in {NOT_AFFECTED.name} why they do not affect us.")
    return 1 if standing else 0


if __name__ == "__main__":
    sys.exit(main())
