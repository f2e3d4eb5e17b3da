"""Whether MPI ranks can be started on this machine."""

import shutil

import pytest

needs_mpirun = pytest.mark.skipif(
    shutil.which("mpirun") is None,
    reason="no mpirun: install Open MPI (on Debian: apt-get install openmpi-bin)",
)
