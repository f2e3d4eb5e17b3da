"""Launch command of Triton: one tritonserver, or under mpirun one a rank.

Rank 0 loads all models and serves requests; the others load the engine's model only, and stay in
its initialization (TensorRT-LLM's leader mode). Source:
triton_backend/scripts/launch_triton_server.py of TensorRT-LLM 1.2.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cog_triton.errors import InvalidArgument, TritonStartFailed
from cog_triton.settings import Settings
from cog_triton.triton import mpi_rank as _rank
from cog_triton.triton.installation import TritonInstallation
from cog_triton.triton.model_repository import ENGINE_MODEL, read_config

EXIT_TIMEOUT_S = 5
# Behind a secret, which our command lines show: clients may map memory, log, trace. The front
# has the list of models from HTTP's model-repository, and lets nothing else pass.
_UNPUBLISHED = "shared-memory,logging,trace"
_UNPUBLISHED_BY_GRPC = f"model-repository,{_UNPUBLISHED}"
_RANK = Path(_rank.__file__).resolve()
# Variables that a rank on another machine needs: mpirun forwards none there.
_FORWARDED_VARIABLES = re.compile(
    r"(LD_LIBRARY_)?PATH|PYTHON\w+|VIRTUAL_ENV|OPAL_PREFIX"
    r"|(CUDA|NCCL|NVIDIA|TLLM|TRTLLM|UCX)_\w+|TRITON_(HOST|HTTP_PORT)"
)
_WORKER_OPTIONS = (
    "--model-control-mode=explicit",
    f"--load-model={ENGINE_MODEL}",
    "--allow-http=false",
    "--allow-grpc=false",
    "--allow-metrics=false",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand:
    """The command that starts all processes of a Triton, and its complete environment.

    `stop_signal`, sent to the command, lets running requests end within `EXIT_TIMEOUT_S`.
    """

    argv: Sequence[str]
    environment: Mapping[str, str]
    stop_signal: signal.Signals


def world_size(settings: Settings, engine: int | None) -> int:
    """Number of tritonservers to start: WORLD_SIZE, else the ranks of the `engine`, else 1.

    Raises:
        InvalidArgument: WORLD_SIZE does not fit the engine.
    """
    given = settings.world_size
    if engine is not None and given not in (None, engine):
        raise InvalidArgument(f"WORLD_SIZE={given}: must be {engine}, the engine's ranks")
    return given or engine or 1


def launch_command(
    settings: Settings,
    triton: TritonInstallation,
    repository: Path,
    run_dir: Path,
    shm_prefix: str,
    world_size: int,
) -> LaunchCommand:
    """The command for `world_size` ranks on `repository`; temporary files go to `run_dir`.

    Names of a rank's shared memory begin with `shm_prefix` and its number. gRPC listens at
    `grpc_socket`, in a directory that has to be there.

    Raises:
        InvalidArgument: settings that contradict each other; names them.
        TritonStartFailed: mpirun is needed and not found.
    """
    # tensorrt_llm_bls calls the engine's model there.
    environment = {
        **triton.environment,
        "TRITON_HOST": settings.triton_host,
        "TRITON_HTTP_PORT": str(settings.triton_http_port),
    }

    def server(rank: int, number: str = "") -> list[str]:
        return _tritonserver(settings, triton, repository, shm_prefix, number or str(rank))

    only_rank = settings.cog_triton_rank
    if only_rank is not None and only_rank >= world_size:
        raise InvalidArgument(f"COG_TRITON_RANK={only_rank}: must be less than {world_size}, all")
    hosts = _mpi_hosts(settings, repository, world_size) if only_rank is None else []
    if world_size == 1 or only_rank is not None:
        argv = server(only_rank or 0)
        return LaunchCommand(argv=argv, environment=environment, stop_signal=signal.SIGTERM)
    argv = [find_mpirun(settings, environment), "--allow-run-as-root", "--oversubscribe"]
    # By default mpirun binds each process, with all its threads, to one core.
    argv += ["--bind-to", "none", *shlex.split(settings.mpirun_args)]
    argv += ["-n", str(world_size)]
    if hosts:
        per_host = world_size // len(hosts)
        # The ranks of a machine follow each other.
        argv += ["--host", ",".join(f"{host}:{per_host}" for host in hosts), "--map-by", "slot"]
        names = sorted(filter(_FORWARDED_VARIABLES.fullmatch, environment))
        argv += ["env", *(f"{name}={environment[name]}" for name in names)]
    else:
        argv.append("--noprefix")  # else mpirun puts its own directories before ours in PATH
    argv += [sys.executable, "-S", "-I", str(_RANK), *server(0)]
    argv += [_rank.OTHER_RANKS, *server(1, _rank.RANK)]
    environment[_rank.SHM_DIRECTORY] = f"/dev/shm/{shm_prefix}mpi"
    if not hosts:  # with hosts, the run directory may be shared between machines, and is not used
        environment |= {
            "OMPI_MCA_orte_tmpdir_base": str(run_dir),
            "PRTE_MCA_prte_tmpdir_base": str(run_dir),
        }
    return LaunchCommand(argv=argv, environment=environment, stop_signal=signal.SIGUSR1)


def find_mpirun(settings: Settings, environment: Mapping[str, str] = os.environ) -> str:
    """Path of mpirun: MPIRUN, else from PATH; raises E2106 saying what to install."""
    given = str(settings.mpirun) if settings.mpirun else "mpirun"
    found = shutil.which(given, path=environment.get("PATH"))
    if found is None:
        where = f"MPIRUN={given!r} is no program" if settings.mpirun else "there is no mpirun"
        raise TritonStartFailed(
            f"an engine of several ranks is started by mpirun, and {where}: install Open MPI (on"
            " Debian: apt-get install openmpi-bin), or set MPIRUN to its path"
        )
    return found


def _tritonserver(
    settings: Settings, triton: TritonInstallation, repository: Path, shm_prefix: str, rank: str
) -> list[str]:
    argv = [
        str(triton.binary),
        f"--model-repository={repository}",
        f"--backend-directory={triton.backend_directory}",
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}{rank}_",
    ]
    if rank != "0":
        return [*argv, *_WORKER_OPTIONS]
    socket, _, number = str(grpc_socket(shm_prefix)).partition(":")
    for kind, host, port in (
        ("http", settings.triton_host, settings.triton_http_port),
        ("grpc", f"unix:{socket}", number),
        ("metrics", settings.triton_host, settings.triton_metrics_port),
    ):
        argv += [f"--{kind}-address={host}", f"--{kind}-port={port}"]
    header = f"cog-triton-unpublished={secrets.token_urlsafe(32)}"
    argv.append(f"--http-restricted-api={_UNPUBLISHED}:{header}")
    argv.append(f"--grpc-restricted-protocol={_UNPUBLISHED_BY_GRPC}:{header}")
    return argv


def grpc_socket(shm_prefix: str) -> Path:
    """Where Triton's gRPC listens: it adds its port to the address that it is given."""
    return Path(f"/dev/shm/{shm_prefix}grpc/s:1")


def _mpi_hosts(settings: Settings, repository: Path, world_size: int) -> list[str]:
    nodes = _num_nodes(repository)
    hosts = settings.mpi_host_names
    if nodes > 1 and not hosts:
        raise InvalidArgument(
            f"num_nodes={nodes}: name the machines in MPI_HOSTS, this one first, or start every"
            " rank by itself, with COG_TRITON_RANK"
        )
    if nodes > 1 and len(hosts) != nodes:
        raise InvalidArgument(f"MPI_HOSTS={settings.mpi_hosts!r}: num_nodes is {nodes}")
    if hosts and world_size % len(hosts):
        raise InvalidArgument(
            f"MPI_HOSTS={settings.mpi_hosts!r}: {world_size} ranks must be equally many on each"
        )
    return hosts


def _num_nodes(repository: Path) -> int:
    path = repository / ENGINE_MODEL / "config.pbtxt"
    if not path.is_file():
        return 1
    value = read_config(path).parameters["num_nodes"].string_value
    return max(int(value), 1) if value.isdecimal() else 1
