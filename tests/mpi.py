"""Whether MPI ranks can be started on this machine."""

import re
import shutil
import subprocess

import pytest


def _major() -> int:
    if shutil.which("mpirun") is None:
        return 0
    said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"Open MPI\) (\d+)", said.stdout)
    return int(found[1]) if found else 0


needs_mpirun = pytest.mark.skipif(
    shutil.which("mpirun") is None,
    reason="no mpirun: install Open MPI (on Debian: apt-get install openmpi-bin)",
)
simulates_machines = pytest.mark.skipif(
    _major() >= 5,
    reason="Open MPI 5 connects no address with itself, so two machines cannot be one",
)
