#!/usr/bin/env python3
"""Write nix/wheels.json: file name and hash of each image's wheels, by lock.

    python scripts/wheels.py [CACHE]

Downloads what the locks name (into CACHE, default .work/wheels), checked against their hashes,
and follows the wheels' own metadata: "cog" is what the project needs everywhere, "cpu" is what
its extra of that name adds. What only development needs is left out. Needs
Python 3.11 or newer, with `packaging`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import tomllib
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.10", "3.11", "3.12")
_GLIBC_MINORS = range(35, 4, -1)


def download(version: str, target: Path) -> None:
    """Download every wheel of one Python's lock; pip checks the hashes."""
    digits = version.replace(".", "")
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBC_MINORS]
    platforms += ["manylinux2014_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    options = ["--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    options += [f"--platform={name}" for name in platforms]
    options += [f"--abi={name}" for name in (f"cp{digits}", "abi3", "none")]
    options += ["--implementation=cp", f"--python-version={version}", f"--dest={target}"]
    lock = ROOT / f"requirements/py{digits}.lock"
    command = [sys.executable, "-m", "pip", "download", *options, "--requirement", str(lock)]
    subprocess.run(command, check=True)


def locked(version: str) -> dict[str, str]:
    """Version of each distribution in the lock of one Python."""
    text = (ROOT / f"requirements/py{version.replace('.', '')}.lock").read_text("utf-8")
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


def files_of(version: str, directory: Path) -> dict[str, Path]:
    """The wheel of each locked distribution; a stale one in the cache is passed over."""
    pins = locked(version)
    found = {}
    for path in sorted(directory.glob("*.whl")):
        name, number, _, _ = parse_wheel_filename(path.name)
        if pins.get(name) == str(number):
            found[str(name)] = path
    if missing := pins.keys() - found.keys():
        raise SystemExit(f"no wheel of {', '.join(sorted(missing))} for Python {version}")
    return found


def requirements_of(wheel: Path) -> list[Requirement]:
    """Requirements in the wheel's METADATA."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    return [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]


def closure(roots: list[Requirement], wheels: dict[str, Path], version: str) -> set[str]:
    """Locked distributions that `roots` depend on, also indirectly, without overridden ones."""
    environment: dict[str, str] = {
        **{name: str(value) for name, value in default_environment().items()},
        "python_version": version,
        "python_full_version": f"{version}.0",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
    }
    seen: set[tuple[str, str]] = set()
    pending = [(root, "") for root in roots]
    while pending:
        requirement, extra = pending.pop()
        if requirement.marker and not requirement.marker.evaluate({**environment, "extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in ("", *requirement.extras):
            if name in wheels and (name, wanted) not in seen:
                seen.add((name, wanted))
                pending += [(item, wanted) for item in requirements_of(wheels[name])]
    return {name for name, _ in seen}


def sri(path: Path) -> str:
    """The file's SHA-256 as Nix writes it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()


def table(version: str, directory: Path) -> dict[str, dict[str, dict[str, str]]]:
    """Sets of wheels for one Python: set, distribution, its file name and hash."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wheels = files_of(version, directory)
    cog = closure([Requirement(text) for text in project["dependencies"]], wheels, version)
    cpu = [Requirement(text) for text in project["optional-dependencies"]["cpu"]]
    sets = {"cog": cog, "cpu": closure(cpu, wheels, version) - cog}
    return {
        name: {
            member: {"file": wheels[member].name, "hash": sri(wheels[member])}
            for member in sorted(members)
        }
        for name, members in sets.items()
    }


def main(arguments: list[str]) -> None:
    """Download, then write the file."""
    cache = Path(arguments[0]) if arguments else ROOT / ".work" / "wheels"
    result = {}
    for version in VERSIONS:
        directory = cache / version
        download(version, directory)
        result[version] = table(version, directory)
    text = json.dumps(result, indent=2, sort_keys=True) + "\n"
    (ROOT / "nix" / "wheels.json").write_text(text, "utf-8")
    for version, sets in result.items():
        print(f"{version}:", ", ".join(f"{len(held)} {name}" for name, held in sets.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
