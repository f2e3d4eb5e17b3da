"""deploy/slurm.sh under a real Slurm: two ranks on two nodes serve, end, and are requeued."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from cluster import NODES, Cluster

from cog_triton.system.ports import free_ports
from cog_triton.triton import installation

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
import tensorrt_llm_engines
from stack import predict, text_of, wait_until

ROOT = Path(__file__).parents[2]
TEXT = "the quick fox"
VALUES = {"prompt": TEXT, "prompt_template": "{prompt}"}
_ALIVE = ("PENDING", "RUNNING", "COMPLETING")
_SHM = "triton_tensorrtllm_backend_shm_region_*"
"""What Triton's Python backend makes for the look-alike; the real backend has none."""
_ENDED = ("CANCELLED", "COMPLETED", "FAILED", "")


class Job:
    """A batch job that serves a small engine of two ranks."""

    def __init__(self, cluster: Cluster, directory: Path, **environment: str) -> None:
        self.cluster, self.directory = cluster, directory
        self._shm_before = {*Path("/dev/shm").glob(_SHM)}
        ports = ("PORT", "TRITON_HTTP_PORT", "TRITON_GRPC_PORT", "TRITON_METRICS_PORT")
        ports = (*ports, "OPENAI_PORT")
        numbers = dict(zip(ports, map(str, free_ports(len(ports))), strict=True))
        self.url = f"http://127.0.0.1:{numbers['PORT']}"
        two = {"world_size": 2, "tp_size": 2, "pp_size": 1, "cp_size": 1}
        engine = tensorrt_llm_engines.make(directory / "engine", pretrained_config__mapping=two)
        self.environment = {
            **numbers,
            "ENGINE": str(engine),
            "COG_HOST": "127.0.0.1",
            "COG_TRITON_SKIP_PREFLIGHT": "true",
            "TRITONSERVER_BACKEND_DIR": str(backends(directory / "backends")),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            **environment,
        }
        words = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--parsable")
        cluster.environment.update(self.environment)
        self.number = cluster.ask(
            "sbatch", *words, f"--chdir={directory}", str(ROOT / "deploy" / "slurm.sh")
        ).strip()

    @property
    def output(self) -> str:
        log = self.directory / f"cog-triton-{self.number}.out"
        return log.read_text() if log.exists() else ""

    def until_ready(self, times: int = 1) -> None:
        def ready() -> bool:
            assert self.cluster.state(self.number) in _ALIVE, self.output
            return self.output.count("Ready in") == times

        wait_until(ready, 90)

    def streamed(self, tokens: int, then: Callable[[], object]) -> str:
        """Stream tokens and do something at the first one; returns what came after it."""
        body, kind = {"input": {**VALUES, "max_tokens": tokens}}, {"Accept": "text/event-stream"}
        url = f"{self.url}/predictions"
        with httpx.stream("POST", url, json=body, headers=kind, timeout=60) as stream:
            lines = stream.iter_lines()
            wait_until(lambda: "the" in next(lines))
            then()
            return "\n".join(lines)

    def ranks(self) -> dict[int, int]:
        """Process ids of the tritonservers, by rank."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            is_server = words[0].endswith(b"bin/tritonserver")
            if is_server and f"SLURM_JOB_ID={self.number}".encode() in variables:
                (rank,) = (line[13:] for line in variables if line.startswith(b"SLURM_PROCID="))
                found[int(rank)] = int(entry.name)
        return found

    def node_of(self, rank: int) -> str:
        (log,) = Path(f"/tmp/cog-triton-{self.number}-{rank}").glob("run/*/triton.log")
        return log.read_text().partition(f"rank {rank} of 2 is on ")[2].split()[0]

    def end(self) -> None:
        self.cluster.ask("scancel", self.number)
        wait_until(lambda: self.cluster.state(self.number) in _ENDED)
        wait_until(lambda: not self.ranks())
        for path in {*Path("/dev/shm").glob(_SHM)} - self._shm_before:  # of a rank that was killed
            path.unlink()


def backends(directory: Path) -> Path:
    """The wheel's backends, and the look-alike of TensorRT-LLM's."""
    directory.mkdir()
    own = installation.find_installation(directory.parent / "own").backend_directory
    for backend in own.iterdir():
        (directory / backend.name).symlink_to(backend)
    (directory / "tensorrtllm").symlink_to(Path(__file__).parent / "tensorrtllm")
    return directory


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    lacking = [name for name in ("slurmctld", "slurmd", "munged") if shutil.which(name) is None]
    if lacking or os.geteuid() != 0:
        pytest.skip(f"needs root and {', '.join(lacking) or 'Slurm'}: run scripts/setup-slurm")
    with Cluster.running(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def job(cluster: Cluster, tmp_path: Path) -> Iterator[Job]:
    job = Job(cluster, tmp_path, REQUEUE="1")
    try:
        yield job
    finally:
        job.end()


def test_a_job_serves_from_two_nodes_and_comes_back_when_a_rank_dies(job: Job) -> None:
    job.until_ready()
    assert {job.node_of(0), job.node_of(1)} == {*NODES}
    assert text_of(predict(job.url, **VALUES, max_tokens=6)) == 2 * TEXT

    before = job.ranks()
    assert sorted(before) == [0, 1]
    assert "E2105" in job.streamed(500, lambda: os.kill(before[1], signal.SIGKILL))

    job.until_ready(2)
    assert not {*before.values()} & {*job.ranks().values()}
    assert text_of(predict(job.url, **VALUES, max_tokens=3)) == TEXT


def test_a_job_that_is_told_to_stop_lets_its_streams_end(job: Job) -> None:
    job.until_ready()
    stop = ("scancel", "--batch", "--signal=TERM", job.number)
    rest = job.streamed(600, lambda: job.cluster.ask(*stop))
    assert '"status":"succeeded"' in rest
    assert '"output_token_count":600' in rest
    wait_until(lambda: job.cluster.state(job.number) == "COMPLETED", 90)
