"""tritonserver process: start, failure, death and stop, with scripts in place of the binary."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_tritonserver import FakeTritonServer
from local_parent import linked
from process_trees import eventually, running
from scripted_server import ScriptedServer, serving, whole
from step_engines import ENGINE

from cog_triton.engines.engine_spec import EngineSpec
from cog_triton.errors import (
    EngineIncompatible,
    InvalidArgument,
    TritonStartFailed,
    TritonUnavailable,
)
from cog_triton.processes.host import Host
from cog_triton.processes.orders import StartEngines
from cog_triton.processes.parent_link import ParentLink
from cog_triton.settings import load_settings
from cog_triton.system import reaper
from cog_triton.system.ports import free_ports
from cog_triton.system.process_state import process_state
from cog_triton.system.redaction import HUB_TOKENS
from cog_triton.triton import installation
from cog_triton.triton.server import TritonClient, TritonServer

pytestmark = pytest.mark.anyio

# Says on what it was started, and what it started itself.
LIVES = """
echo "$@"
sleep 600 &
echo $! $$ > pids
touch up
wait
"""
DIES = """
echo "I0101 a line of the log"
echo "+-------+"
echo "| table |"
echo
echo "E0101 the engine is broken" >&2
exit 3
"""


def executable(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncd {path.parent}\n{body}")
    path.chmod(0o755)
    return path


class Scripted:
    """A tritonserver of a script, which touches `up` when it would answer."""

    def __init__(self, directory: Path, parent: ParentLink, body: str, **settings: Any) -> None:
        self.bin = directory / "triton" / "bin"
        binary = executable(self.bin / "tritonserver", body)
        made = load_settings(tritonserver=binary, cog_triton_keys="keys", **settings)
        self.server = TritonServer(made, directory / "repo", parent)
        self.error: Exception | None = None
        self.probes = 0

    async def start(self) -> None:
        await self.server.start(self._is_ready, self._probe)

    async def _is_ready(self) -> bool:
        return (self.bin / "up").exists()

    async def _probe(self) -> None:
        self.probes += 1
        (self.bin / "probed").touch()
        if self.error:
            raise self.error

    def pids(self) -> list[int]:
        file = self.bin / "pids"
        return [int(pid) for pid in file.read_text().split()] if file.exists() else []

    def assert_nothing_is_left(self) -> None:
        assert not self.server.root_pid
        assert not any(map(running, self.pids()))


@asynccontextmanager
async def scripted(directory: Path, body: str, **settings: Any) -> AsyncIterator[Scripted]:
    async with linked(directory) as parent:
        yield Scripted(directory, parent, body, **settings)


def refusal(directory: Path, body: str, error: Exception | None = None, **settings: Any) -> str:
    """Why it does not start: `error` is that of its first request."""

    async def main() -> str:
        async with scripted(directory, body, **settings) as triton:
            triton.error = error
            with pytest.raises(TritonStartFailed) as caught:
                await triton.start()
            triton.assert_nothing_is_left()
        return caught.value.detail

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("end", "trap"), [(TritonServer.stop, ""), (TritonServer.kill, "trap '' TERM\n")]
)
async def test_start_probe_and_end_with_all_descendants(
    end: Callable[[TritonServer], Coroutine[Any, Any, None]], trap: str, tmp_path: Path
) -> None:
    async with scripted(tmp_path, trap + LIVES) as triton:
        assert not triton.server.root_pid
        await triton.start()
        assert triton.server.root_pid
        assert triton.probes == 1
        assert len(triton.pids()) == 2
        for _ in range(2):
            await end(triton.server)
            triton.assert_nothing_is_left()


async def test_the_next_server_takes_triton_and_engines_over(tmp_path: Path) -> None:
    host = Host(tmp_path, lambda message: None)
    order = StartEngines(EngineSpec.of(ENGINE, {"max_batch_size": "1"}), str(tmp_path), "", {})

    async def served() -> tuple[bool, tuple[Any, ...], tuple[Any, ...]]:
        """Whether a server finds a loaded engine, its Triton and its engines; then it ends."""
        async with linked(tmp_path, host) as parent:
            loaded, triton = parent.has_loaded, Scripted(tmp_path, parent, LIVES)
            parent.engines.choose(order)
            await triton.start()
            engines = (await parent.engines.wait_until_serving(), parent.engines._state)
            server = triton.server
            of_triton = (server.root_pid, server.grpc_target, server.steps_key, triton.pids())
            return loaded, of_triton, (*engines, parent.engines.variables)

    loaded, triton, engines = await served()
    assert not loaded
    assert await served() == (True, triton, engines)
    os.kill(triton[0], signal.SIGKILL)  # while no server is there
    await eventually(lambda: host._triton is None)
    loaded, others, same = await served()
    assert (loaded, same) == (True, engines)
    assert not {*others[:3]} & {*triton[:3]}
    await host.stop(kills=True)
    assert not any(map(running, (others[0], *engines[1].pids)))


def test_death_during_start_is_raised_with_the_last_lines(tmp_path: Path) -> None:
    said = refusal(tmp_path, f"for i in $(seq 1000); do echo line $i; done; {DIES}")
    assert "exited with code 3" in said
    assert "E0101 the engine is broken" in said
    assert "I0101 a line of the log" in said
    assert "table" not in said
    assert str(tmp_path / "triton.log") in said
    assert "line 1000" in said
    assert "line 900\n" not in said


async def test_a_first_start_that_crashes_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = f"echo x >> starts; [ $(wc -l < starts) -gt 2 ] || kill -SEGV $$\n{LIVES}"
    async with scripted(tmp_path, body) as triton:
        await triton.start()
        await triton.server.kill()
        assert len(caplog.messages) == 2
        assert caplog.messages[1].startswith(
            "Triton crashed at its start (SIGSEGV, attempt 2 of 3)"
        )
        (triton.bin / "starts").write_text("")
        (triton.bin / "up").unlink()
        with pytest.raises(TritonStartFailed, match="was ended by SIGSEGV"):
            await triton.start()  # it is the supervisor's turn


IN_USE = "failed to start HTTP service: Unavailable - Socket '127.0.0.1:2222' already in use "
FOR_PROBE = f"touch up; while [ ! -e probed ]; do sleep 0.01; done; {DIES}"


@pytest.mark.parametrize(
    ("body", "error", "settings", "said"),
    [
        (
            f'echo "{IN_USE}"; exit 1',
            None,
            {"triton_http_port": 2222},
            "TRITON_HTTP_PORT=2222 is in use by now; choose",
        ),
        ("kill -STOP $$", None, {}, r"process .* of Triton was stopped during"),
        (FOR_PROBE, TritonUnavailable("the connection broke"), {}, "exited with code 3"),
        (r"printf '\377\376 bad'; exit 1", None, {}, "bad"),
        (
            LIVES.replace("touch up", "echo still loading"),
            None,
            {"triton_start_timeout": 0.5},
            r"within 0\.5 s \(TRITON_START_TIMEOUT\).*\n(.*\n)*still loading",
        ),
        (LIVES, InvalidArgument("x=1: must be 2"), {}, "first request failed: E1005 .* x=1"),
    ],
    ids=["port", "stopped", "probed", "bytes", "timeout", "probe"],
)
def test_why_a_start_fails(
    body: str, error: Exception | None, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    assert re.search(said, refusal(tmp_path, body, error, **settings))


async def test_cancelled_start_leaves_no_process(tmp_path: Path) -> None:
    async with scripted(tmp_path, LIVES.replace("touch up", "touch started")) as triton:
        body = "echo $$ > started\nmv started pids\nexec sleep 600"
        python = executable(tmp_path / "engine" / "python", body)
        spec = replace(EngineSpec.of("a:b", {}), python=str(python))
        triton.server.engines.choose(StartEngines(spec, str(tmp_path), "", {}))
        task = asyncio.ensure_future(triton.start())
        await eventually((triton.bin / "started").exists)
        await eventually(python.with_name("pids").exists)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        triton.assert_nothing_is_left()
        assert not running(int(python.with_name("pids").read_text()))


@pytest.mark.parametrize(("minor", "fits"), [(10, False), (11, True)])
def test_a_server_of_an_older_python_is_refused_by_its_stub(
    minor: int, fits: bool, tmp_path: Path
) -> None:
    """The wheel has the stub of each Python: NGC's containers have one of them."""
    binary = executable(tmp_path / "opt" / "bin" / "tritonserver", "")
    stub = tmp_path / "opt" / "backends" / "python" / "triton_python_backend_stub"
    stub.parent.mkdir(parents=True)
    (origin,) = importlib.util.find_spec("pytriton").submodule_search_locations  # type: ignore[union-attr,misc]
    stubs = Path(origin) / "tritonserver" / "python_backend_stubs"
    stub.symlink_to(stubs / f"3.{minor}" / stub.name)
    if fits:
        assert installation.find_installation(tmp_path, binary).binary == binary
        return
    with pytest.raises(EngineIncompatible, match=rf"Python 3\.{minor}, and cog-triton needs 3\.11"):
        installation.find_installation(tmp_path, binary)


not_in_an_image = pytest.mark.skipif(
    installation._IMAGE_BINARY.is_file(), reason="an image's own tritonserver comes first"
)


@not_in_an_image
def test_wheels_backends_are_linked_with_the_stub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/own")
    found = installation.find_installation(tmp_path)
    assert os.access(found.binary, os.X_OK)
    stub = found.backend_directory / "python" / "triton_python_backend_stub"
    assert os.access(stub, os.X_OK)
    assert (found.backend_directory / "python" / "libtriton_python.so").is_file()
    assert found.backend_directory.is_relative_to(tmp_path)
    assert found.environment["PATH"].split(":")[0] == str(Path(sys.prefix) / "bin")
    assert found.environment["LD_LIBRARY_PATH"].split(":")[-1] == "/own"
    again = installation.find_installation(tmp_path)
    assert again.backend_directory == found.backend_directory


async def test_an_engine_that_dies_while_it_loads_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    body = "echo $$ > started\nmv started pids\nsleep 600"
    python = executable(tmp_path / "engine" / "python", body)
    async with scripted(tmp_path, body, triton_start_timeout=300) as triton:
        spec = replace(EngineSpec.of("a:b", {}), python=str(python))
        triton.server.engines.choose(StartEngines(spec, str(tmp_path), "", {}))
        files = [triton.bin / "pids", python.with_name("pids")]
        start = asyncio.ensure_future(triton.start())
        await eventually(lambda: all(file.exists() for file in files))
        started = [int(file.read_text()) for file in files]
        own, engine = (Path(f"/proc/{pid}/environ").read_bytes() for pid in started)
        assert b"CUDA_VISIBLE_DEVICES=\0" in own
        assert b"CUDA_VISIBLE_DEVICES=0\0" in engine
        os.kill(started[1], signal.SIGKILL)
        with pytest.raises(TritonStartFailed, match=r"the engine did not load: .* has ended"):
            await start
        triton.assert_nothing_is_left()
        assert not running(started[1])


def port_of(triton: ScriptedServer) -> int:
    return int(triton.url.rpartition(":")[2])


def asked(port: int, question: Callable[[TritonClient], Coroutine[Any, Any, Any]]) -> Any:
    """The answer of the Triton whose HTTP and metrics are at `port`."""
    settings = load_settings().model_copy(
        update={"triton_http_port": port, "triton_metrics_port": port}
    )

    async def main() -> Any:
        async with aclosing(TritonClient(settings)) as client:
            return await question(client)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("rows", "count"),
    [
        (["tensorrt_llm active 3", "tensorrt_llm waiting 5", "other active 7"], 3),
        (["tensorrt_llm waiting 5"], None),
    ],
)
def test_active_requests_are_those_of_the_engine(rows: list[str], count: int | None) -> None:
    lines = ""
    for model, kind, number in map(str.split, rows):
        labels = f'model="{model}",request_type="{kind}",version="1"'
        lines += f"nv_trt_llm_request_metrics{{{labels}}} {number}\n"
    with serving([whole(lines.encode(), kind="text/plain")]) as triton:
        assert asked(port_of(triton), TritonClient.active_requests) == count
    assert triton.requests[0].path == "/metrics"


@asynccontextmanager
async def ready(directory: Path) -> AsyncIterator[FakeTritonServer]:
    """A Triton that is started, with both stubs and what all three started."""

    async def is_ready() -> bool:
        return len(of(small, "sleep")) == 3

    async with linked(directory) as parent:
        small = FakeTritonServer(directory, parent)
        await small.server.start(is_ready, nothing)
        yield small


async def nothing() -> None:
    """A probe that finds all well."""


def of(small: FakeTritonServer, word: str) -> list[int]:
    """Its processes with `word` in their command line."""
    lines = {
        pid: Path(f"/proc/{pid}/cmdline").read_text()
        for pid in reaper.descendants(small.server.root_pid)
    }
    return [pid for pid, line in sorted(lines.items()) if word in line]


@pytest.mark.parametrize(
    ("word", "number", "said"),
    [
        ("bin/tritonserver", signal.SIGKILL, "tritonserver"),
        ("tensorrt_llm/1/model.py", signal.SIGKILL, "the stub of tensorrt_llm"),
        ("reaper.py", signal.SIGSTOP, ""),
        ("sleep\x00601", signal.SIGSTOP, ""),
    ],
)
async def test_dead_or_stopped_process_is_named(
    tmp_path: Path, word: str, number: int, said: str
) -> None:
    async with ready(tmp_path) as triton:
        (victim, *_) = [*of(triton, word), triton.server.root_pid]
        watch = asyncio.ensure_future(triton.server.wait_for_failure())
        await asyncio.sleep(0.1)
        assert not watch.done()
        os.kill(victim, number)
        found = await watch
        if said:
            assert found == f"{said} (process {victim}) has died"
        else:
            assert found == f"process {victim} of Triton was stopped"
            await eventually(lambda: process_state(victim) in ("", "Z"))


async def test_a_death_while_an_engine_is_restarted_ends_that(tmp_path: Path) -> None:
    async def not_ready() -> bool:
        return False

    async with ready(tmp_path) as triton:
        (stub,) = of(triton, "preprocessing/1/model.py")
        os.kill(stub, signal.SIGKILL)
        said = rf"the stub of preprocessing \(process {stub}\) has died during start-up"
        for _ in range(2):
            with pytest.raises(TritonStartFailed, match=said):
                await triton.server.wait_until_ready(not_ready, nothing)


async def is_up() -> bool:
    return True


async def test_no_grpc_port_listens_while_tenants_have_keys(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    async with linked(tmp_path) as parent:
        given = {"triton_grpc_port": port, "cog_triton_keys": "/keys"}
        server = FakeTritonServer(tmp_path, parent, **given).server
        await server.start(is_up, nothing)
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", port)) != 0


async def test_a_grpc_port_that_another_took_ends_the_start_and_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        async with linked(tmp_path) as parent:
            given = {"triton_grpc_port": port, "cog_triton_keys": None}
            server = FakeTritonServer(tmp_path, parent, **given).server
            with pytest.raises(TritonStartFailed, match=f"TRITON_GRPC_PORT={port} is in use"):
                await server.start(is_up, nothing)
            assert not server.root_pid


@pytest.mark.parametrize("needed", [frozenset(), HUB_TOKENS])
async def test_triton_gets_no_secret_but_those_that_its_engine_needs(
    needed: frozenset[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {"OPENAI_API_KEY", "COG_TRITON_API_KEY", "AWS_SECRET_ACCESS_KEY", *HUB_TOKENS}
    for name in secrets:
        monkeypatch.setenv(name, "x")
    code = "import json, os, sys; json.dump(dict(os.environ), sys.stdout)"
    binary = executable(tmp_path / "triton" / "bin" / "tritonserver", f"python3 -c '{code}' > env")
    async with linked(tmp_path) as parent:
        made = load_settings(tritonserver=binary)
        server = TritonServer(made, tmp_path / "repo", parent, secrets=needed)
        with pytest.raises(TritonStartFailed):
            await server.start(is_up, asyncio.Event().wait)
    found = json.loads((binary.parent / "env").read_text())
    assert found["PATH"]
    assert set(found) & secrets == needed
