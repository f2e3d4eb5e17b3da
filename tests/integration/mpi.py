"""Whether ranks can be started here."""

import shutil

import pytest

needs_mpirun = pytest.mark.skipif(
    shutil.which("mpirun") is None,
    reason="no mpirun: install Open MPI (on Debian: apt-get install openmpi-bin)",
)
