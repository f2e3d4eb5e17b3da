"""Slurm for these tests, as scripts/setup-slurm installs it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS / "unit"), str(_TESTS / "integration")]

from cluster import Cluster  # noqa: E402


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    lacking = [name for name in ("slurmctld", "slurmd", "munged") if shutil.which(name) is None]
    if lacking or os.geteuid() != 0:
        pytest.skip(f"needs root and {', '.join(lacking) or 'Slurm'}: run scripts/setup-slurm")
    with Cluster.running(tmp_path_factory.mktemp("slurm")) as running:
        yield running
