"""MPI ranks: two tritonservers under the real mpirun serve, die and stop together."""

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from local_parent import linked
from mpi import needs_mpirun, simulates_machines
from stack import wait_until

from cog_triton.engines import tensor_contract
from cog_triton.engines.engine_spec import ADDRESS_VARIABLE
from cog_triton.engines.generate_stream import GenerateStream
from cog_triton.engines.registry import open_engine
from cog_triton.errors import CogTritonError, TritonStartFailed, TritonUnknownError
from cog_triton.processes.parent_link import ParentLink
from cog_triton.serving.admission import admission_for
from cog_triton.serving.supervisor import Supervisor, SupervisorState
from cog_triton.settings import load_settings
from cog_triton.system import reaper
from cog_triton.system.ports import free_ports
from cog_triton.triton.model_repository import render_repository
from cog_triton.triton.request_streams import RequestStreams
from cog_triton.triton.serve_config import ServeConfig
from cog_triton.triton.server import TritonClient, TritonServer

pytestmark = [pytest.mark.integration, pytest.mark.full, needs_mpirun]

MODEL = Path(__file__).parents[1] / "ranks"
# What stands for ssh: it stays here, in an environment as bare as a login's, but for the address of
# the engine's process, which no engine of several machines has. Two daemons on one machine would
# share the files that each has on its own elsewhere, so these get a place per host.
AGENT = """#!/bin/sh
host=$1
echo $host >> {here}/hosts
mkdir {here}/$host
shift
exec env -i TMPDIR={here}/$host PATH=/usr/bin:/bin HOME=/nonexistent \\
  {address}="${address}" sh -c "$*"
"""
PROMPT = [504, 3575, 282, 260]


class Ranks:
    """A server of two ranks in a directory of its own."""

    def __init__(self, parent: ParentLink, engine_dir: Path, **settings: Any) -> None:
        http, metrics = free_ports(2)
        self.settings = load_settings(
            triton_http_port=http,
            triton_metrics_port=metrics,
            cog_triton_keys=Path("/"),  # no relay, which would need a port
            **settings,
        )
        self.directory = parent.run_dir
        repository = render_repository(
            open_engine(engine_dir),
            ServeConfig({"tensorrt_llm": {"num_threads": 1}}),
            self.directory / "model_repo",
        )
        shutil.copytree(MODEL, repository / "tensorrt_llm" / "1", dirs_exist_ok=True)
        self.server = TritonServer(self.settings, repository, parent, 2)
        self.client = TritonClient(self.settings)
        self.processes: set[int] = set()
        self._before = {*Path("/dev/shm").iterdir()}

    async def start(self) -> None:
        await self.server.start(self.client.is_ready, self.predict)
        self.processes |= reaper.descendants(self.server.root_pid)
        log = self.server.log.read_text()
        for rank in (0, 1):
            assert f"rank {rank} of 2 has joined" in log

    async def predict(self) -> None:
        values = {
            "input_ids": PROMPT,
            "input_lengths": len(PROMPT),
            "request_output_len": 5,
            "end_id": -1,
            "streaming": True,
        }
        url = self.settings.triton_url
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_HTTP_PORT", str(self.settings.triton_http_port))
            request = GenerateStream("tensorrt_llm", "probe", values, TritonUnknownError, 60)
        events = await asyncio.to_thread(lambda: [*request.events()])
        ids = [event["output_ids"] for event in events]
        assert sum(len(one) if isinstance(one, list) else 1 for one in ids) == 5
        url = f"{url}/v2/models/tensorrt_llm_bls/generate"
        body = {"text_input": "Hi", "max_tokens": 2}
        text = await asyncio.to_thread(httpx.post, url, json=body, timeout=60)
        assert text.status_code == 200, text.text

    def tritonserver(self, rank: int) -> int:
        """The process of a rank's tritonserver."""
        mark = "--allow-http=false" if rank else "--http-port="
        (found,) = (
            pid
            for pid in reaper.descendants(self.server.root_pid)
            if (words := command_line(pid)) and words[0].endswith("bin/tritonserver")
            if any(word.startswith(mark) for word in words)
        )
        return found

    async def until_dead(self) -> None:
        while self.server.root_pid:
            await asyncio.sleep(0.02)

    def assert_nothing_is_left(self) -> None:
        wait_until(lambda: not any(running(pid) for pid in self.processes))
        ours = (f"cog_triton_{os.getpid()}_", "vader_segment")  # the latter is Open MPI's
        left = {path for path in Path("/dev/shm").iterdir() if path.name.startswith(ours)}
        assert left <= self._before


def command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def run(
    main: Callable[[Ranks], Coroutine[Any, Any, None]],
    directory: Path,
    engine_dir: Path,
    **settings: Any,
) -> None:
    async def limited() -> None:
        async with linked(directory) as parent:
            await asyncio.wait_for(main(Ranks(parent, engine_dir, **settings)), 120)

    asyncio.run(limited())


def test_ranks_serve_restart_and_stop(tmp_path: Path, engine_dir: Path) -> None:
    async def main(ranks: Ranks) -> None:
        await ranks.start()
        await ranks.predict()
        os.kill(ranks.tritonserver(1), signal.SIGKILL)
        await ranks.until_dead()
        ranks.assert_nothing_is_left()
        assert "rank 1: tritonserver exited with code 137" in ranks.server.log.read_text()
        await ranks.start()
        await ranks.client.aclose()  # a connection that is kept would hold Triton up
        await ranks.server.stop()
        ranks.assert_nothing_is_left()
        log = ranks.server.log.read_text()
        assert "RuntimeError: the leader has shut down" in log
        assert "exited with" not in log
        assert list(ranks.directory.glob("ompi.*")) == []

    run(main, tmp_path, engine_dir)


def test_the_supervisor_restarts_the_group_when_a_rank_dies(
    tmp_path: Path, engine_dir: Path
) -> None:
    given_up: list[CogTritonError] = []

    async def main(ranks: Ranks) -> None:
        transport = RequestStreams(
            lambda: ranks.server.grpc_target,
            60,
            TritonUnknownError,
            tensor_contract.encode_request,
            ranks.server.engine_inputs(),
        )
        supervisor = Supervisor(
            ranks.settings,
            ranks.server,
            ranks.client,
            transport,
            ranks.predict,
            admission_for(ranks.settings, 8),
            given_up.append,
        )
        await supervisor.start()
        ranks.processes |= reaper.descendants(ranks.server.root_pid)
        before = ranks.processes.copy()
        os.kill(ranks.tritonserver(1), signal.SIGKILL)
        while not (supervisor.restarts == 1 and supervisor.state is SupervisorState.READY):
            await asyncio.sleep(0.02)
        assert not any(running(pid) for pid in before)
        ranks.processes |= reaper.descendants(ranks.server.root_pid)
        await ranks.predict()
        await supervisor.stop()
        assert given_up == []
        ranks.assert_nothing_is_left()

    run(main, tmp_path, engine_dir)


def test_exit_of_rank_0_ends_the_other_ranks(tmp_path: Path, engine_dir: Path) -> None:
    async def main(ranks: Ranks) -> None:
        await ranks.start()
        await ranks.client.aclose()
        os.kill(ranks.tritonserver(0), signal.SIGTERM)  # and so exits with 0
        await ranks.until_dead()
        ranks.assert_nothing_is_left()

    run(main, tmp_path, engine_dir)


def test_rank_that_cannot_start_fails_the_start(tmp_path: Path, engine_dir: Path) -> None:
    broken = 'if World().rank == 1:\n    raise RuntimeError("rank 1 is broken")\n'

    async def main(ranks: Ranks) -> None:
        model = tmp_path / "model_repo" / "tensorrt_llm" / "1" / "model.py"
        model.write_text(f"{model.read_text()}\n{broken}")
        with pytest.raises(TritonStartFailed, match=r"exited with code \d+ during start-up"):
            await ranks.start()
        await ranks.client.aclose()
        assert "rank 1 is broken" in ranks.server.log.read_text()
        ranks.assert_nothing_is_left()

    run(main, tmp_path, engine_dir)


@simulates_machines
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_ranks_run_on_two_machines(tmp_path: Path, engine_dir: Path, how: str) -> None:
    agent = tmp_path / "way"
    agent.write_text(AGENT.format(here=tmp_path, address=ADDRESS_VARIABLE))
    agent.chmod(0o755)
    (tmp_path / "run").mkdir()

    async def main(ranks: Ranks) -> None:
        await ranks.start()
        await ranks.client.aclose()
        assert sorted((tmp_path / "hosts").read_text().split()) == ["node-a", "node-b"]
        if how == "stop":
            await ranks.server.stop()
            assert "exited with" not in ranks.server.log.read_text()
        else:
            os.kill(ranks.tritonserver(1), signal.SIGKILL)
            await ranks.until_dead()
        ranks.assert_nothing_is_left()

    remote = {"mpi_hosts": "node-a,node-b", "mpirun_args": f"--mca plm_rsh_agent {agent}"}
    run(main, tmp_path / "run", engine_dir, **remote)
