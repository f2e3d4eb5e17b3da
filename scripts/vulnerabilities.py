#!/usr/bin/env python3
"""Known vulnerabilities of what is shipped: locks and SBOMs against OSV's database.

    .venv/bin/python scripts/vulnerabilities.py [--osv FILE | --osv-url URL] [--sbom FILE ...]

Asks OSV through pip-audit (requirements/tools.lock, in .work/tools). Where that service cannot be
reached, --osv takes its export: a zip, a directory, or a JSON file of advisories in OSV's format.
--sbom adds the Python packages of an image (`./result sbom`) to those of the locks.
requirements/not-affected.yaml has what is known not to affect us, and why.
Exit status: 0 none, 1 some, 2 not looked: no database, or a wrong file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
AUDIT = ROOT / ".work" / "tools"
_FIELDS = {"id": str, "package": str, "reason": str, "until": datetime.date}
_PURL = re.compile(r"pkg:pypi/([^@]+)@([^?#]+)")
_TIMEOUT_S = 900


class NotLooked(Exception):
    """Reason for which nothing can be said of vulnerabilities."""


class Finding(NamedTuple):
    """A vulnerability of a version of a package, by all its names."""

    package: str
    version: str
    names: tuple[str, ...]
    fixed: tuple[str, ...]
    summary: str


class Exemption(NamedTuple):
    """A vulnerability that does not affect us: why, and the day until which that is believed."""

    name: str
    package: str
    reason: str
    until: datetime.date


Packages = Mapping[tuple[str, str], Sequence[str]]
"""Places that have a package, by its name and version."""


def locked(lock: Path) -> list[tuple[str, str]]:
    """The packages of a lock."""
    pins = re.findall(r"^([\w.-]+)==([^\s\\]+)", lock.read_text("utf-8"), re.MULTILINE)
    return [(canonicalize_name(name), version) for name, version in pins]


def described(sbom: Path) -> tuple[list[tuple[str, str]], int]:
    """The Python packages of an SPDX document, and how many others it has."""
    try:
        packages = json.loads(sbom.read_text("utf-8"))["packages"]
        references = [one.get("externalRefs", []) for one in packages]
        purls = [each["referenceLocator"] for one in references for each in one]
    except (OSError, RecursionError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotLooked(f"{sbom}: is no SBOM in SPDX's JSON: {error}") from None
    found = [_PURL.match(purl) for purl in purls]
    python = [(str(canonicalize_name(unquote(one[1]))), unquote(one[2])) for one in found if one]
    return python, found.count(None)


def read_exemptions(path: Path = NOT_AFFECTED) -> list[Exemption]:
    """The table of what does not affect us; every field is required."""
    try:
        rows = yaml.safe_load(path.read_text("utf-8")) or []
    except (OSError, yaml.YAMLError) as error:
        raise NotLooked(f"{path}: {error}") from None
    if not isinstance(rows, list):
        raise NotLooked(f"{path}: must be a list")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or row.keys() != _FIELDS.keys():
            raise NotLooked(f"{path}: entry {number}: must have {', '.join(_FIELDS)}, no others")
        for key, kind in _FIELDS.items():
            if type(row[key]) is not kind or not row[key]:
                what = "a date, as 2027-01-31" if kind is datetime.date else "text"
                raise NotLooked(f"{path}: entry {number}: {key}: must be {what}")
    return [
        Exemption(row["id"], canonicalize_name(row["package"]), row["reason"].strip(), row["until"])
        for row in rows
    ]


def advisories(source: Path) -> Iterator[Mapping[str, Any]]:
    """The advisories of an export: a zip or a directory of JSON files, or one file of several."""
    texts: Iterator[bytes]
    try:
        if source.is_dir():
            texts = (path.read_bytes() for path in sorted(source.rglob("*.json")))
        elif zipfile.is_zipfile(source):
            texts = _members(source)
        else:
            texts = iter([source.read_bytes()])
        for text in texts:
            read = json.loads(text)
            if isinstance(read, dict) and "vulns" in read:
                read = read["vulns"]
            for one in read if isinstance(read, list) else [read]:
                if not isinstance(one, dict) or not isinstance(one.get("id"), str):
                    raise NotLooked(f"{source}: has what is no advisory of OSV: no id")
                yield one
    except (OSError, RecursionError, ValueError, zipfile.BadZipFile) as error:
        raise NotLooked(f"{source}: {error}") from None


def _members(source: Path) -> Iterator[bytes]:
    with zipfile.ZipFile(source) as archive:
        for name in archive.namelist():
            if name.endswith(".json"):
                yield archive.read(name)


def by_file(packages: Packages, source: Path) -> list[Finding]:
    """Findings by an export of OSV; raises `NotLooked` if it has nothing on Python packages."""
    versions: dict[str, list[str]] = {}
    for name, version in packages:
        versions.setdefault(name, []).append(version)
    found, known = [], 0
    for advisory in advisories(source):
        try:
            mine, count = _affecting(advisory, versions)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            why = f"{advisory['id']} is not in OSV's format: {error!r}"
            raise NotLooked(f"{source}: {why}") from None
        found, known = found + mine, known + count
    if not known:
        raise NotLooked(f"{source}: has no advisory on a package of PyPI")
    return sorted(found)


def _affecting(
    advisory: Mapping[str, Any], versions: Mapping[str, Sequence[str]]
) -> tuple[list[Finding], int]:
    """The findings of an advisory, and how many packages of PyPI it is on."""
    mine: dict[tuple[str, str], set[str]] = {}
    known = 0
    for affected in advisory.get("affected", []):
        package = affected.get("package", {})
        if package.get("ecosystem") != "PyPI":
            continue
        known += 1
        name = canonicalize_name(package["name"])
        for version in versions.get(name, ()):
            if _is_affected(affected, version):
                mine.setdefault((name, version), set()).update(_fixed(affected))
    if advisory.get("withdrawn"):
        return [], known
    names = (advisory["id"], *advisory.get("aliases", []))
    summary = str(advisory.get("summary", ""))
    return [
        Finding(*one, names, tuple(sorted(fixed)), summary) for one, fixed in mine.items()
    ], known


def _is_affected(affected: Mapping[str, Any], version: str) -> bool:
    """Whether OSV's entry of a package names a version, or has it in a range."""
    if version in affected.get("versions", []):
        return True
    return any(
        _in_range(one.get("events", []), Version(version))
        for one in affected.get("ranges", [])
        if one.get("type") == "ECOSYSTEM"
    )


def _in_range(events: Iterable[Mapping[str, str]], version: Version) -> bool:
    """OSV's evaluation: events in order of their versions, the last one that applies decides.

    A version that PEP 440 does not know applies to none: OSV lists such ones in `versions`.
    """
    ordered = []
    for event in events:
        ((kind, text),) = list(event.items())[:1]
        try:
            ordered.append((Version("0.dev0" if text == "0" else text), kind))
        except InvalidVersion:
            continue
    inside = False
    for at, kind in sorted(ordered):
        if kind == "introduced" and version >= at:
            inside = True
        elif (kind == "fixed" and version >= at) or (kind == "last_affected" and version > at):
            inside = False
    return inside


def _fixed(affected: Mapping[str, Any]) -> Iterator[str]:
    for one in affected.get("ranges", []):
        if one.get("type") == "ECOSYSTEM":
            yield from (event["fixed"] for event in one.get("events", []) if "fixed" in event)


def by_service(packages: Packages, url: str | None, work: Path) -> list[Finding]:
    """Findings of OSV's service, by pip-audit; a file of pins for each version of a package."""
    files: list[dict[str, str]] = []
    for name, version in packages:
        room = next((one for one in files if name not in one), None)
        if room is None:
            files.append(room := {})
        room[name] = version
    _bring_pip_audit()
    found = []
    for number, pins in enumerate(files):
        path = work / f"pins-{number}.txt"
        path.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        command = [sys.executable, "-m", "pip_audit", "--requirement", str(path), "--no-deps"]
        command += ["--disable-pip", "--vulnerability-service", "osv", "--format", "json"]
        command += ["--progress-spinner", "off", *(["--osv-url", url] if url else [])]
        environment = {**os.environ, "PYTHONPATH": str(AUDIT)}
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=_TIMEOUT_S
        )
        try:
            rows = json.loads(done.stdout)["dependencies"]
        except (ValueError, KeyError):
            last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
            raise NotLooked(f"pip-audit cannot ask OSV: {' '.join(last) or 'no answer'}") from None
        if skipped := [row["name"] for row in rows if "skip_reason" in row]:
            raise NotLooked(f"pip-audit skips {', '.join(skipped)}")
        found += [
            Finding(
                canonicalize_name(row["name"]),
                row["version"],
                (each["id"], *each.get("aliases", [])),
                tuple(each.get("fix_versions", [])),
                " ".join(each.get("description", "").split())[:200],
            )
            for row in rows
            for each in row["vulns"]
        ]
    return sorted(found)


def _bring_pip_audit() -> None:
    done = subprocess.run([ROOT / "scripts" / "setup-tools"], capture_output=True, text=True)
    if done.returncode:
        raise NotLooked(f"pip-audit cannot be installed: {done.stderr.strip()[-300:]}")


def judge(
    findings: Sequence[Finding], exemptions: Sequence[Exemption], today: datetime.date
) -> tuple[list[Finding], list[str]]:
    """The findings that stand, and notes: on those that do not, and on rows that are out of use."""
    standing, notes, used = [], [], set()
    for finding in findings:
        rows = [
            row
            for row in exemptions
            if row.package == finding.package and row.name in finding.names
        ]
        used.update(rows)
        valid = [row for row in rows if row.until >= today]
        if valid:
            notes.append(f"{_title(finding)}: not affected: {valid[0].reason}")
            continue
        notes += [f"{row.name}: believed until {row.until} only: look again" for row in rows]
        standing.append(finding)
    notes += [
        f"{row.name} of {row.package}: in {NOT_AFFECTED.name}, and not found: take it out"
        for row in exemptions
        if row not in used
    ]
    return standing, notes


def _title(finding: Finding) -> str:
    return f"{finding.package} {finding.version}: {', '.join(finding.names)}"


def table(path: Path = NOT_AFFECTED) -> str:
    """The table of docs/supply-chain.md."""
    rows = [
        f"| {row.name} | {row.package} | {row.reason} | {row.until} |"
        for row in read_exemptions(path)
    ]
    head = ["| vulnerability | package | why it does not affect us | believed until |"]
    head += ["|---|---|---|---|"]
    return "\n".join([*head, *(rows or ["| none | | | |"])]) + "\n"


def look(sboms: Sequence[Path], osv: Path | None, url: str | None, work: Path) -> int:
    """Look for vulnerabilities, and print them; returns the exit status."""
    places: dict[tuple[str, str], list[str]] = {}
    for lock in SHIPPED:
        for one in locked(REQUIREMENTS / f"{lock}.lock"):
            places.setdefault(one, []).append(f"{lock}.lock")
    for sbom in sboms:
        python, others = described(sbom)
        for one in python:
            places.setdefault(one, []).append(sbom.name)
        if others:
            print(f"{sbom.name}: {others} packages of other systems: not looked at, scan the image")
    exemptions = read_exemptions()
    work.mkdir(parents=True, exist_ok=True)
    findings = by_file(places, osv) if osv else by_service(places, url, work)
    standing, notes = judge(findings, exemptions, datetime.date.today())
    for note in notes:
        print(note)
    for finding in standing:
        fixed = "; fixed in " + (", ".join(finding.fixed) or "no version")
        where = ", ".join(places[finding.package, finding.version])
        print(f"VULNERABLE: {_title(finding)}{fixed}; in {where}\n  {finding.summary}")
    source = osv.name if osv else url or "OSV's service"
    print(f"{len(places)} packages against {source}: {len(standing)} vulnerabilities")
    if standing:
        print(f"Raise their versions, or say in {NOT_AFFECTED.name} why they do not affect us.")
    return 1 if standing else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and look."""
    parser = argparse.ArgumentParser(description="Known vulnerabilities of what is shipped.")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--osv", type=Path, metavar="FILE", help="OSV's export, by file")
    source.add_argument("--osv-url", metavar="URL", help="another service with OSV's API")
    parser.add_argument("--sbom", type=Path, action="append", default=[], metavar="FILE")
    given = parser.parse_args(arguments)
    try:
        return look(given.sbom, given.osv, given.osv_url, ROOT / ".work" / "vulnerabilities")
    except KeyboardInterrupt:
        return 130
    except (NotLooked, OSError, subprocess.TimeoutExpired) as error:
        print(f"vulnerabilities: not looked: {error}", file=sys.stderr)
        if not given.osv:
            print(
                "vulnerabilities: without that service: OSV=FILE, its export of PyPI (all.zip)",
                file=sys.stderr,
            )
        return 2


if __name__ == "__main__":
    sys.exit(main())
