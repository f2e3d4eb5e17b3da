"""Launch command of Triton, for one rank and for several."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from cog_triton.errors import InvalidArgument, TritonStartFailed
from cog_triton.settings import load_settings
from cog_triton.triton import launch, mpi_rank
from cog_triton.triton.installation import TritonInstallation
from cog_triton.triton.launch import LaunchCommand

TRITON = Path("/opt/tritonserver/bin/tritonserver")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    model = tmp_path / "run" / "model_repo" / "tensorrt_llm"
    model.mkdir(parents=True)
    (model / "config.pbtxt").write_text('name: "tensorrt_llm"')
    return model.parent


@pytest.fixture
def mpirun(tmp_path: Path) -> Path:
    path = tmp_path / "mpi" / "bin" / "mpirun"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def made(repository: Path, world_size: int, **settings: Any) -> LaunchCommand:
    environment = {
        "PATH": "/nowhere",
        "LD_LIBRARY_PATH": "/own",
        "NCCL_DEBUG": "INFO",
        "HF_TOKEN": "secret",
    }
    return launch.launch_command(
        load_settings(**settings),
        TritonInstallation(TRITON, Path("/backends"), environment),
        repository,
        repository.parent,
        "cog_triton_ab_",
        world_size,
    )


def ranks(command: LaunchCommand) -> tuple[list[str], list[list[str]]]:
    """mpirun's own options, with its environment's, and the command of each rank."""
    argv = list(command.argv)
    assert ":" not in argv  # of several programs, the mpirun of Open MPI 5.0.7 crashes
    start = argv.index("-n")
    count = int(argv[start + 1])
    wrapper = argv.index(str(mpi_rank.__file__))
    assert argv[wrapper - 3 : wrapper] == [sys.executable, "-S", "-I"]
    words = argv[wrapper + 1 :]
    return argv[: wrapper - 3], [mpi_rank.command_of(words, str(rank)) for rank in range(count)]


def shm_prefix(words: list[str]) -> str:
    (option,) = (word for word in words if word.startswith("--backend-config="))
    return option.removeprefix("--backend-config=python,shm-region-prefix-name=")


def test_one_rank_starts_tritonserver_without_mpirun(repository: Path) -> None:
    command = made(repository, 1, triton_http_port=1, triton_metrics_port=3)
    assert command.argv[0] == str(TRITON)
    assert command.stop_signal == signal.SIGTERM
    assert {
        f"--model-repository={repository}",
        "--backend-directory=/backends",
        "--disable-auto-complete-config",
        "--http-port=1",
        "--grpc-port=1",
        "--metrics-port=3",
        "--http-address=127.0.0.1",
        "--grpc-address=unix:/dev/shm/cog_triton_ab_grpc/s",
        "--metrics-address=127.0.0.1",
    } <= {*command.argv}
    assert command.environment["TRITON_HOST"] == "127.0.0.1"
    assert command.environment["TRITON_HTTP_PORT"] == "1"


def test_several_ranks_start_under_one_mpirun(repository: Path, mpirun: Path) -> None:
    command = made(repository, 3, mpirun=mpirun, mpirun_args="--mca btl_tcp_if_include 'eth 0'")
    options, servers = ranks(command)
    assert options[0] == str(mpirun)
    assert {"--allow-run-as-root", "--oversubscribe", "--noprefix"} <= {*options}
    assert options[options.index("--bind-to") + 1] == "none"
    assert options[options.index("--mca") :][:3] == ["--mca", "btl_tcp_if_include", "eth 0"]
    assert command.stop_signal == signal.SIGUSR1
    assert [words[0] for words in servers] == [str(TRITON)] * 3
    assert [shm_prefix(words) for words in servers] == [f"cog_triton_ab_{n}_" for n in range(3)]
    assert command.environment["OMPI_MCA_orte_tmpdir_base"] == str(repository.parent)
    assert command.environment["TRITON_HTTP_PORT"] == "8000"
    leader, *workers = servers
    assert "--http-port=8000" in leader
    assert "--load-model=tensorrt_llm" not in leader
    for words in workers:
        assert {
            "--model-control-mode=explicit",
            "--load-model=tensorrt_llm",
            "--allow-http=false",
            "--allow-grpc=false",
            "--allow-metrics=false",
        } <= {*words}
        assert not [word for word in words if "-port=" in word]


def test_mpi_hosts_get_equal_ranks_and_environment(repository: Path, mpirun: Path) -> None:
    command = made(repository, 4, mpirun=mpirun, mpi_hosts="a, b")
    options, servers = ranks(command)
    assert "--noprefix" not in options
    assert "OMPI_MCA_orte_tmpdir_base" not in command.environment
    start = options.index("--host")
    assert options[start - 2 :] == [
        *("-n", "4", "--host", "a:2,b:2", "--map-by", "slot", "env"),
        "LD_LIBRARY_PATH=/own",
        "NCCL_DEBUG=INFO",
        "PATH=/nowhere",
        "TRITON_HOST=127.0.0.1",
        "TRITON_HTTP_PORT=8000",
    ]
    assert [shm_prefix(words) for words in servers] == [f"cog_triton_ab_{n}_" for n in range(4)]
    assert "secret" not in str(command.argv)
    with pytest.raises(InvalidArgument, match="MPI_HOSTS='a,b,c': 4 ranks must be equally many"):
        made(repository, 4, mpirun=mpirun, mpi_hosts="a,b,c")


def with_nodes(repository: Path, value: str) -> None:
    (repository / "tensorrt_llm" / "config.pbtxt").write_text(
        f'parameters {{ key: "num_nodes" value {{ string_value: "{value}" }} }}'
    )


def test_num_nodes_without_mpi_hosts_is_rejected(repository: Path, mpirun: Path) -> None:
    with_nodes(repository, "2")
    with pytest.raises(InvalidArgument, match="num_nodes=2: name the machines in MPI_HOSTS"):
        made(repository, 4, mpirun=mpirun)
    with pytest.raises(InvalidArgument, match="MPI_HOSTS='a': num_nodes is 2"):
        made(repository, 4, mpirun=mpirun, mpi_hosts="a")
    assert len(ranks(made(repository, 4, mpirun=mpirun, mpi_hosts="a,b"))[1]) == 4
    assert made(repository, 4, cog_triton_rank=3).argv[0] == str(TRITON)


def test_missing_mpirun_fails_with_advice(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(TritonStartFailed, match="there is no mpirun: install Open MPI"):
        made(repository, 2)
    with pytest.raises(TritonStartFailed, match=r"MPIRUN='.*none' is no program"):
        made(repository, 2, mpirun=tmp_path / "none")


@pytest.mark.parametrize(
    ("setting", "engine", "count"),
    [(None, None, 1), (None, 4, 4), (2, None, 2), (4, 4, 4), (2, 1, None), (1, 4, None)],
)
def test_the_world_size_is_the_settings_or_the_engines_if_they_agree(
    setting: int | None, engine: int | None, count: int | None
) -> None:
    settings = load_settings(world_size=setting)
    if count is not None:
        assert launch.world_size(settings, engine) == count
        return
    with pytest.raises(InvalidArgument, match=f"WORLD_SIZE={setting}: must be {engine}"):
        launch.world_size(settings, engine)


def test_what_is_not_for_clients_is_behind_a_secret_of_each_start(repository: Path) -> None:
    def locked() -> str:
        words = made(repository, 1, triton_host="0.0.0.0").argv
        (http,) = [word for word in words if word.startswith("--http-restricted-api=")]
        (grpc,) = [word for word in words if word.startswith("--grpc-restricted-protocol=")]
        apis, _, header = http.partition("=")[2].partition(":")
        assert apis == "shared-memory,logging,trace"
        assert grpc.partition("=")[2] == f"model-repository,{apis}:{header}"
        return header.rpartition("=")[2]

    first, second = locked(), locked()
    assert first != second
    assert len(first) > 30
