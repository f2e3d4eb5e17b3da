#!/usr/bin/env python3
"""Write nix/{wheels,test-wheels,vllm-wheels}.json: file and hash of locked wheels.

    python scripts/wheels.py [CACHE]

Downloads what the locks name (into CACHE, default .work/wheels; 4 GB), checked against their
hashes, and follows the wheels' own metadata: "cog" is what the project needs everywhere, "cpu" is
what its extra of that name and requirements/serve.in add. What only development needs is in
test-wheels.json, for the tests of `nix flake check`.
The lock of the vLLM images is taken whole. Needs Python 3.11 or newer, with `packaging`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.11", "3.12")
VLLM_PYTHON = "3.12"
VLLM_LOCK = ROOT / "requirements" / "vllm-py312.lock"
_GLIBC_MINORS = range(35, 4, -1)


def lock_of(version: str) -> Path:
    """Lock of one Python."""
    return ROOT / f"requirements/py{version.replace('.', '')}.lock"


def download(version: str, lock: Path, target: Path) -> None:
    """Download every wheel of a lock for one Python; pip checks the hashes."""
    digits = version.replace(".", "")
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBC_MINORS]
    platforms += [f"manylinux{year}_x86_64" for year in ("2014", "2010", "1")] + ["linux_x86_64"]
    options = ["--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    options += [f"--platform={name}" for name in platforms]
    options += [f"--abi={name}" for name in (f"cp{digits}", "abi3", "none")]
    options += ["--implementation=cp", f"--python-version={version}", f"--dest={target}"]
    command = [sys.executable, "-m", "pip", "download", *options, "--requirement", str(lock)]
    subprocess.run(command, check=True)


def locked(lock: Path) -> dict[str, str]:
    """Version of each distribution in a lock."""
    text = lock.read_text("utf-8")
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


def files_of(lock: Path, directory: Path) -> dict[str, Path]:
    """The wheel of each locked distribution; a stale one in the cache is passed over."""
    pins = locked(lock)
    found = {}
    for path in sorted(directory.glob("*.whl")):
        name, number, _, _ = parse_wheel_filename(path.name)
        if pins.get(name) == str(number):
            found[str(name)] = path
    if missing := pins.keys() - found.keys():
        raise SystemExit(f"{lock.name}: no wheel of {', '.join(sorted(missing))}")
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
    wheels = files_of(lock_of(version), directory)
    cog = closure([Requirement(text) for text in project["dependencies"]], wheels, version)
    carriers = (ROOT / "requirements" / "serve.in").read_text("utf-8").split()
    cpu = [Requirement(text) for text in project["optional-dependencies"]["cpu"] + carriers]
    sets = {"cog": cog, "cpu": closure(cpu, wheels, version) - cog}
    return {name: described(members, wheels) for name, members in sets.items()}


def described(members: Iterable[str], wheels: dict[str, Path]) -> dict[str, dict[str, str]]:
    """File name and hash of distributions, as nix/fetch-wheel.nix takes them."""
    return {
        name: {"file": wheels[name].name, "hash": sri(wheels[name])} for name in sorted(members)
    }


def write(name: str, content: object) -> None:
    """Write a file of nix/."""
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    (ROOT / "nix" / name).write_text(text, "utf-8")


def main(arguments: list[str]) -> None:
    """Download, then write the files."""
    cache = Path(arguments[0]) if arguments else ROOT / ".work" / "wheels"
    result, tests = {}, {}
    for version in VERSIONS:
        directory = cache / version
        download(version, lock_of(version), directory)
        result[version] = table(version, directory)
        wheels = files_of(lock_of(version), directory)
        held = {name for members in result[version].values() for name in members}
        tests[version] = described(wheels.keys() - held, wheels)
    write("wheels.json", result)
    write("test-wheels.json", tests)
    download(VLLM_PYTHON, VLLM_LOCK, cache / "vllm-image")
    vllm = files_of(VLLM_LOCK, cache / "vllm-image")
    write("vllm-wheels.json", {VLLM_PYTHON: described(vllm, vllm)})
    for version, sets in result.items():
        print(f"{version}:", ", ".join(f"{len(held)} {name}" for name, held in sets.items()))
    print(f"{VLLM_PYTHON}, vLLM: {len(vllm)}")


if __name__ == "__main__":
    main(sys.argv[1:])
