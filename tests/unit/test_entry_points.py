"""Programs of the package that are run by path or with -m, and every name of a module in a text."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = (ROOT / "docs" / "source.md").read_text("utf-8").partition("## Programs")[2]
RUN_WITH_M = re.findall(r"`python -m (cog_triton[\w.]*)`", PROGRAMS)
RUN_BY_PATH = re.findall(r"^\| `(cog_triton/[\w/]+\.py)` \|", PROGRAMS, re.MULTILINE)
_DOTTED = re.compile(r"\bcog_triton(?:_prune)?(?:\.(?!__)[A-Za-z_]\w*)+")
_PATH = re.compile(r"\bcog_triton(?:_prune)?/(?!_data/)[\w/]+\.py\b")
_RUN_WITH_M = re.compile(r"""-m["',\s]+(cog_triton[\w.]*)""")
# Names of telemetry, not of modules.
_NOT_MODULES = {"cog_triton.time_to_first_token", "cog_triton.queue_time"}


@cache
def texts() -> dict[str, str]:
    """Every text file of the repository but the history of changes and recorded data."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = {}
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if name != "CHANGELOG.md" and "/data/" not in name and path.is_file():
            text = path.read_bytes()
            if b"cog_triton" in text and b"\0" not in text:
                found[name] = text.decode("utf-8")
    return found


def named(pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    for file, text in texts().items():
        for match in pattern.finditer(text):
            yield file, match[match.re.groups and 1]


def resolves(dotted: str) -> bool:
    """Whether a dotted name is a module, or a name that a module defines, at any depth."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:end])
        if path.is_dir():
            return end == len(parts)
        if path.with_suffix(".py").is_file():
            words = path.with_suffix(".py").read_text("utf-8")
            return all(re.search(rf"\b{part}\b", words) for part in parts[end:])
    return False


def test_every_module_named_in_a_text_exists() -> None:
    unknown = {
        (file, name)
        for file, name in named(_DOTTED)
        if name not in _NOT_MODULES and not resolves(name)
    }
    assert unknown == set()


def test_every_file_named_in_a_text_exists() -> None:
    assert {(file, name) for file, name in named(_PATH) if not (ROOT / name).exists()} == set()


def test_what_is_run_with_m_is_listed() -> None:
    assert {name for _, name in named(_RUN_WITH_M)} <= {*RUN_WITH_M}


@pytest.mark.parametrize("name", RUN_WITH_M)
def test_a_module_that_is_run_has_a_main(name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin)
    if path.name == "__init__.py":
        path = path.with_name("__main__.py")
    assert path.name == "__main__.py" or '__name__ == "__main__"' in path.read_text("utf-8")


@pytest.mark.parametrize("name", RUN_BY_PATH)
def test_a_program_that_is_run_by_path_has_no_neighbour_of_the_standard_library(name: str) -> None:
    path = ROOT / name
    assert '__name__ == "__main__"' in path.read_text("utf-8")
    assert {entry.stem for entry in path.parent.iterdir()} & sys.stdlib_module_names == set()
