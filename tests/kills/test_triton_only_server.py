"""``cog-triton serve --triton-only`` as run in a shell."""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import tritonclient.grpc as grpcclient
from layers import full
from mpi import needs_mpirun
from stack import Stack, processes_of, shared_memory, wait_until

pytestmark = pytest.mark.integration

MOCK = ("--engine", "mock", "--tps", 30)


class Alone(Stack):
    """Triton without Cog."""

    def __init__(self, work_dir: Path, *arguments: object, **environment: str) -> None:
        super().__init__(work_dir, None, **environment)
        self.command += ["--triton-only", *map(str, arguments)]

    def until_ready(self) -> None:
        assert self.process is not None
        wait_until(lambda: "ready in" in self.output or self.process.poll() is not None)
        assert self.process.poll() is None, self.output

    def ask(self) -> str:
        body = {"text_input": "Hi", "max_tokens": 4}
        answer = httpx.post(f"{self.triton}/v2/models/ensemble/generate", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["text_output"]
        return text


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Alone]]:
    made: list[Alone] = []

    def start(*arguments: object, **environment: str) -> Alone:
        made.append(Alone(tmp_path / f"work{len(made)}", *arguments, **environment))
        made[-1].start()
        return made[-1]

    yield start
    for item in made:
        item.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    running = Alone(tmp_path_factory.mktemp("alone") / "work", *MOCK)
    with running.served():
        yield running


@pytest.mark.full
def test_two_servers_run_on_one_host(
    alone: Alone, make: Callable[..., Alone], tmp_path: Path
) -> None:
    (repository,) = alone.work_dir.glob("run/*/model_repo")
    copy = shutil.copytree(repository, tmp_path / "models")
    other = make("--model_repo", copy)
    other.until_ready()
    assert other.ask() == alone.ask() != ""
    pids = [*processes_of(other.work_dir)]
    assert shared_memory(pids)
    os.kill(other.process.pid, signal.SIGKILL)
    wait_until(lambda: not processes_of(other.work_dir))
    assert shared_memory(pids) == []
    assert alone.ask()


@pytest.mark.parametrize("number", [full(signal.SIGINT), signal.SIGTERM])
def test_signals_stop_the_server(make: Callable[..., Alone], number: int) -> None:
    server = make(*MOCK)
    server.until_ready()
    assert httpx.get(f"{server.triton}/v2/health/ready").status_code == 200
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        assert client.is_server_ready()
    for port in (server.http, server.grpc, server.metrics):
        assert str(port) in server.output
    pids = [*processes_of(server.work_dir)]
    assert server.finish(number)[0] == 0
    assert processes_of(server.work_dir) == {}
    assert shared_memory(pids) == []


@pytest.mark.full
def test_death_of_triton_ends_the_server(make: Callable[..., Alone]) -> None:
    server = make(*MOCK)
    server.until_ready()
    (pid,) = (
        pid
        for pid, line in processes_of(server.work_dir).items()
        if line.split()[0].endswith("bin/tritonserver")
    )
    os.kill(pid, signal.SIGKILL)
    code, output = server.finish(seconds=60)
    assert code == 1
    assert "E2105 TritonUnavailable: " in output
    assert "has died; its last lines" in output


@pytest.mark.parametrize("how", [full(signal.SIGSTOP), signal.SIGKILL])
def test_a_stub_that_ends_or_is_stopped_ends_the_server(
    make: Callable[..., Alone], how: signal.Signals
) -> None:
    server = make(*MOCK)
    server.until_ready()
    lines = processes_of(server.work_dir).items()
    (pid,) = [pid for pid, line in lines if "/preprocessing/1/model.py" in line]
    os.kill(pid, how)
    code, output = server.finish()
    assert code == 1
    named = "the stub of preprocessing (process {}) has died"
    said = named if how == signal.SIGKILL else "process {} of Triton was stopped"
    assert said.format(pid) in output
    wait_until(lambda: not processes_of(server.work_dir))


@pytest.mark.full
def test_an_engine_that_keeps_dying_ends_the_server(make: Callable[..., Alone]) -> None:
    server = make(*MOCK, TRITON_MAX_RESTARTS="1")
    server.until_ready()
    deaths = set()
    while server.process.poll() is None:
        for pid, line in processes_of(server.work_dir).items():
            engine = "cog_triton.backend.engine_process" in line.split()[1:3]
            served = 1 + len(re.findall(r"engine process \d+ serves", server.output))
            if engine and len(deaths) < served:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                deaths.add(pid)
        time.sleep(0.1)
    code, output = server.finish()
    assert code == 1
    assert "E2105 TritonUnavailable: given up after 1 restarts in a row" in output
    assert len(deaths) >= 2
    assert processes_of(server.work_dir) == {}


@pytest.mark.full
def test_bad_options_are_coded_errors(
    alone: Alone, make: Callable[..., Alone], engine_dir: Path, tmp_path: Path
) -> None:
    taken = make(engine_dir, TRITON_GRPC_PORT=str(alone.grpc))
    empty = make("--model-repo", tmp_path)
    both = make("--model-repo", tmp_path, engine_dir)
    ranks = make(engine_dir, "--world-size", "2")
    for server, expected, says in (
        (taken, 1, f"E1005 InvalidArgument: TRITON_GRPC_PORT={alone.grpc}: cannot listen"),
        (empty, 1, "E1005 InvalidArgument: --model-repo="),
        (both, 2, "goes with --triton-only"),
        (ranks, 1, "E1005 InvalidArgument: WORLD_SIZE=2: must be 1, the engine's ranks"),
    ):
        code, output = server.finish(seconds=60)
        assert (code, says in output) == (expected, True), output


@pytest.mark.full
@needs_mpirun
def test_two_ranks_serve_a_model_repository(
    stack: Stack, make: Callable[..., Alone], tmp_path: Path
) -> None:
    (repository,) = stack.work_dir.glob("run/*/model_repo")
    copy = shutil.copytree(repository, tmp_path / "models")
    model = copy / "tensorrt_llm" / "1"
    shutil.copytree(Path(__file__).parents[1] / "ranks", model, dirs_exist_ok=True)
    server = make("--world_size", 2, "--model_repo", copy)
    server.until_ready()
    assert "on 2 ranks" in server.output
    assert server.ask()
    assert server.finish(signal.SIGINT)[0] == 0
    assert processes_of(server.work_dir) == {}


@pytest.mark.full
def test_one_rank_of_two_starts_alone(
    alone: Alone, make: Callable[..., Alone], tmp_path: Path
) -> None:
    """What Slurm starts: rank 1 has no endpoint, and needs no free port."""
    (repository,) = alone.work_dir.glob("run/*/model_repo")
    server = make(
        *("--world-size", 2, "--model-repo", repository),
        COG_TRITON_RANK="1",
        TRITON_HTTP_PORT=str(alone.http),
    )
    wait_until(lambda: "Rank 1 of 2 started" in server.output)
    log = re.findall(r"log: (\S+)\)", server.output)[0]
    wait_until(lambda: "successfully loaded 'tensorrt_llm'" in Path(log).read_text())
    assert "ensemble" not in Path(log).read_text()
    assert server.finish(signal.SIGTERM)[0] == 0
