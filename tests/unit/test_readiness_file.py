"""coglet's readiness file on Kubernetes: given up where it cannot be written."""

from __future__ import annotations

from pathlib import Path

from cog_triton.serving.coglet.readiness_file import require_writable

KUBERNETES = "KUBERNETES_SERVICE_HOST"


def test_a_readiness_file_that_can_be_written_stays(tmp_path: Path) -> None:
    environment = {KUBERNETES: "10.0.0.1"}
    require_writable(environment, tmp_path / "run" / "cog")
    assert environment == {KUBERNETES: "10.0.0.1"}
    assert (tmp_path / "run" / "cog").is_dir()


def test_a_readiness_file_that_cannot_be_written_is_given_up() -> None:
    environment = {KUBERNETES: "10.0.0.1", "HOME": "/"}
    require_writable(environment, Path("/proc/nothing/cog"))
    assert environment == {"HOME": "/"}


def test_outside_kubernetes_no_directory_is_made(tmp_path: Path) -> None:
    require_writable({}, tmp_path / "cog")
    assert not (tmp_path / "cog").exists()
