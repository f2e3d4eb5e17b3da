"""Paths that Triton's shell takes as one word."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cog_triton.errors import InvalidArgument
from cog_triton.triton.server import shell_safe


@pytest.mark.parametrize("name", ["plain", "größe", "a.b+c,d:e@f%g=h^i_j-k"])
def test_one_word_of_a_shell_is_taken_as_it_is(tmp_path: Path, name: str) -> None:
    assert shell_safe(tmp_path / name, "cog_triton_x_") == tmp_path / name


@pytest.mark.parametrize("character", " \t\n'\"`$;&|<>()[]{}*?~#!\\")
def test_other_names_get_a_link(tmp_path: Path, character: str) -> None:
    path = tmp_path / f"a{character}b"
    path.mkdir()
    link = shell_safe(path, f"cog_triton_{os.getpid()}_")
    try:
        assert link.parent == Path("/dev/shm")
        words = f"printf '%s\\n' {link}/end"  # as Triton starts a stub
        said = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=True)
        assert said.stdout == f"{link}/end\n"
        assert link.resolve() == path.resolve()
    finally:
        link.unlink()
    with pytest.raises(InvalidArgument, match="MPI_HOSTS='a,b'"):
        shell_safe(path, "cog_triton_x_", "a,b")
