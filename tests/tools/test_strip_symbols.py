"""Stripped shared objects load and run, and a library that is needed but missing is found."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
ROOT = Path(__file__).parents[2]
SOURCE = """
#include <math.h>
static __thread int calls;
static double table[4096] = {1.5};
static double zeros[100000];
__attribute__((constructor)) static void start(void) { zeros[7] = 2.0; }
static double hidden(double x) { return sqrt(x) + table[0] + zeros[7]; }
double visible(double x) { calls++; return hidden(x) + calls; }
const char *device_code __attribute__((section(".nv_fatbin"))) = "code";
"""


def load(name: str) -> ModuleType:
    """A program of nix/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "nix" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


strip_symbols = load("strip_symbols")
needed_libraries = load("needed_libraries")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A library with debugging information."""
    (tmp_path / "x.c").write_text(SOURCE)
    path = tmp_path / "libx.so"
    options = ["-g3", "-shared", "-fPIC", "-Wl,-soname,libx.so.1", "-o", str(path)]
    subprocess.run(["gcc", *options, str(tmp_path / "x.c"), "-lm"], check=True)
    return path


def sections(path: Path) -> set[str]:
    """Names of a file's sections."""
    text = subprocess.run(["readelf", "-SW", path], capture_output=True, text=True, check=True)
    assert not text.stderr
    return {word for word in text.stdout.split() if word.startswith(".")}


def test_a_stripped_library_works(library: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = library.stat()
    names = sections(library)
    strip_symbols.main([library])
    assert "stripped" in capsys.readouterr().out
    assert library.stat().st_size < before.st_size
    assert library.stat().st_mode == before.st_mode
    gone = names - sections(library)
    assert {".symtab", ".strtab", ".debug_info"} <= gone
    assert {".nv_fatbin", ".dynsym", ".text", ".bss"} <= sections(library)
    function = ctypes.CDLL(str(library)).visible
    function.argtypes, function.restype = [ctypes.c_double], ctypes.c_double
    assert function(16.0) == 4.0 + 1.5 + 2.0 + 1


def test_stripping_again_and_other_files_change_nothing(library: Path, tmp_path: Path) -> None:
    script = tmp_path / "libm.so"
    script.write_text("/* GNU ld script */ GROUP ( libm.so.6 )")
    strip_symbols.main([library, script])
    once = library.read_bytes()
    strip_symbols.main([library])
    assert library.read_bytes() == once
    assert script.read_text().startswith("/* GNU")


def test_another_link_to_the_file_keeps_its_symbols(library: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.so"
    other.hardlink_to(library)
    strip_symbols.main([library])
    assert ".symtab" in sections(other)


def test_missing_libraries_are_found(
    library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (tmp_path / "y.c").write_text("double visible(double); double y(void) { return visible(1); }")
    command = ["gcc", "-shared", "-fPIC", str(tmp_path / "y.c"), str(library), "-o"]
    subprocess.run([*command, str(site / "y.cpython-312.so")], check=True)
    (site / "empty.so").touch()
    assert needed_libraries.main([site]) == 1
    assert capsys.readouterr().out == f"libx.so.1: needed by {site}/y.cpython-312.so\n"
    library.rename(site / "libx.so")  # by its own name, whatever the file's
    assert needed_libraries.main([site]) == 0
