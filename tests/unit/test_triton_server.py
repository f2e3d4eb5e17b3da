"""tritonserver process: start, failure and stop, with scripts in place of the binary."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer, serving, whole

from cog_triton.engines.engine_spec import EngineSpec
from cog_triton.errors import (
    EngineIncompatible,
    InvalidArgument,
    TritonStartFailed,
    TritonUnavailable,
)
from cog_triton.processes.engine_fleet import EngineFleet
from cog_triton.settings import load_settings
from cog_triton.system.ports import free_ports
from cog_triton.triton import installation
from cog_triton.triton.server import TritonClient, TritonServer

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


def server(directory: Path, body: str, **settings: Any) -> TritonServer:
    binary = executable(directory / "triton" / "bin" / "tritonserver", body)
    made = load_settings(tritonserver=binary, cog_triton_keys="keys", **settings)
    return TritonServer(made, directory / "repo", directory)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(coroutine, 60)

    asyncio.run(limited())


class Readiness:
    """`up` is what the script touches when it would answer."""

    def __init__(self, directory: Path, error: Exception | None = None) -> None:
        self._up = directory / "triton" / "bin" / "up"
        self._error = error
        self.probes = 0

    async def is_ready(self) -> bool:
        return self._up.exists()

    async def probe(self) -> None:
        self.probes += 1
        self._up.with_name("probed").touch()
        if self._error:
            raise self._error


def pids(directory: Path) -> list[int]:
    return [int(pid) for pid in (directory / "triton" / "bin" / "pids").read_text().split()]


def living(directory: Path) -> list[int]:
    return [pid for pid in pids(directory) if _runs(pid)]


def _runs(pid: int) -> bool:
    """Whether `pid` is there and no zombie that the machine's init has yet to reap."""
    try:
        state = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_start_probe_and_stop_with_all_descendants(tmp_path: Path) -> None:
    triton, readiness = server(tmp_path, LIVES), Readiness(tmp_path)

    async def main() -> None:
        assert not triton.alive
        await triton.start(readiness.is_ready, readiness.probe)
        assert triton.alive
        assert readiness.probes == 1
        assert len(living(tmp_path)) == 2
        await triton.stop()
        assert not triton.alive
        await triton.stop()

    run(main())
    assert living(tmp_path) == []


def test_kill_leaves_no_process(tmp_path: Path) -> None:
    triton, readiness = server(tmp_path, "trap '' TERM\n" + LIVES), Readiness(tmp_path)
    run(triton.start(readiness.is_ready, readiness.probe))
    triton.kill()
    assert not triton.alive
    assert living(tmp_path) == []
    triton.kill()


def test_port_taken_after_the_check_is_named(tmp_path: Path) -> None:
    said = "failed to start HTTP service: Unavailable - Socket '127.0.0.1:2222' already in use "
    triton = server(tmp_path, f"cat <<'END'\n{said}\nEND\nexit 1", triton_http_port=2222)
    readiness = Readiness(tmp_path)
    with pytest.raises(TritonStartFailed, match="TRITON_HTTP_PORT=2222 is in use by now; choose"):
        run(triton.start(readiness.is_ready, readiness.probe))


def test_two_servers_use_different_shared_memory_names(tmp_path: Path) -> None:
    prefixes = set()
    for name in ("a", "b"):
        triton, readiness = server(tmp_path / name, LIVES), Readiness(tmp_path / name)
        run(triton.start(readiness.is_ready, readiness.probe))
        triton.kill()
        said = triton.log.read_text().split()
        assert f"--model-repository={tmp_path / name}/repo" in said
        assert f"--backend-directory={tmp_path / name}/triton/backends" in said
        prefixes |= {a for a in said if "shm-region-prefix" in a}
    assert len(prefixes) == 2


def test_death_during_start_is_raised_with_the_last_lines(tmp_path: Path) -> None:
    triton, readiness = server(tmp_path, DIES, triton_start_timeout=60), Readiness(tmp_path)
    with pytest.raises(TritonStartFailed) as caught:
        run(triton.start(readiness.is_ready, readiness.probe))
    said = caught.value.detail
    assert "exited with code 3" in said
    assert "E0101 the engine is broken" in said
    assert "I0101 a line of the log" in said
    assert "table" not in said
    assert str(triton.log) in said
    assert not triton.alive


@pytest.mark.parametrize(("crashes", "number"), [(2, "ABRT"), (1, "SEGV")])
def test_a_first_start_that_crashes_is_tried_again(
    crashes: int, number: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = f"echo x >> starts; [ $(wc -l < starts) -gt {crashes} ] || kill -{number} $$\n{LIVES}"
    triton, readiness = server(tmp_path, body), Readiness(tmp_path)
    run(triton.start(readiness.is_ready, readiness.probe))
    triton.kill()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == crashes
    assert told[-1].startswith(f"Triton crashed at its start (SIG{number}, attempt {crashes} of 3)")
    (tmp_path / "triton" / "bin" / "starts").write_text("")
    (tmp_path / "triton" / "bin" / "up").unlink()
    with pytest.raises(TritonStartFailed, match=f"was ended by SIG{number}"):
        run(triton.start(readiness.is_ready, readiness.probe))  # it is the supervisor's turn


@pytest.mark.parametrize(("number", "starts"), [("ABRT", 3), ("KILL", 1)])
def test_starts_that_end_by_signals_are_bounded(number: str, starts: int, tmp_path: Path) -> None:
    triton, readiness = (
        server(tmp_path, f"echo x >> starts; kill -{number} $$"),
        Readiness(tmp_path),
    )
    with pytest.raises(TritonStartFailed):
        run(triton.start(readiness.is_ready, readiness.probe))
    assert (tmp_path / "triton" / "bin" / "starts").read_text() == "x\n" * starts
    assert not triton.alive


def test_a_process_stopped_during_the_start_fails_it(tmp_path: Path) -> None:
    triton, readiness = server(tmp_path, "kill -STOP $$"), Readiness(tmp_path)
    with pytest.raises(TritonStartFailed, match=r"tritonserver \(process .* was stopped during"):
        run(triton.start(readiness.is_ready, readiness.probe))


def test_death_during_the_probe_is_raised_as_death(tmp_path: Path) -> None:
    body = f"touch up; while [ ! -e probed ]; do sleep 0.01; done; {DIES}"
    gone = TritonUnavailable("the connection to Triton broke")
    triton, readiness = server(tmp_path, body), Readiness(tmp_path, gone)
    with pytest.raises(TritonStartFailed, match="exited with code 3"):
        run(triton.start(readiness.is_ready, readiness.probe))


def test_error_has_only_the_end_of_a_long_log(tmp_path: Path) -> None:
    body = "for i in $(seq 1000); do echo line $i; done; exit 1"
    triton, readiness = server(tmp_path, body), Readiness(tmp_path)
    with pytest.raises(TritonStartFailed) as caught:
        run(triton.start(readiness.is_ready, readiness.probe))
    assert "line 1000" in caught.value.detail
    assert "line 900\n" not in caught.value.detail


def test_log_may_contain_any_bytes(tmp_path: Path) -> None:
    triton, readiness = server(tmp_path, r"printf '\377\376 bad'; exit 1"), Readiness(tmp_path)
    with pytest.raises(TritonStartFailed, match="bad"):
        run(triton.start(readiness.is_ready, readiness.probe))


def test_start_timeout_is_raised_when_never_ready(tmp_path: Path) -> None:
    body = LIVES.replace("touch up", "echo still loading")
    triton = server(tmp_path, body, triton_start_timeout=0.5)
    readiness = Readiness(tmp_path)
    with pytest.raises(
        TritonStartFailed, match=r"within 0\.5 s \(TRITON_START_TIMEOUT\)"
    ) as caught:
        run(triton.start(readiness.is_ready, readiness.probe))
    assert "still loading" in caught.value.detail
    assert not triton.alive
    assert living(tmp_path) == []


def test_failed_probe_fails_the_start(tmp_path: Path) -> None:
    triton = server(tmp_path, LIVES)
    readiness = Readiness(tmp_path, InvalidArgument("x=1: must be 2"))
    with pytest.raises(TritonStartFailed, match=r"first request failed: E1005 .* x=1"):
        run(triton.start(readiness.is_ready, readiness.probe))
    assert living(tmp_path) == []


def test_unexpected_error_fails_the_start(tmp_path: Path) -> None:
    triton, readiness = server(tmp_path, LIVES), Readiness(tmp_path, ZeroDivisionError("bug"))
    with pytest.raises(ZeroDivisionError):
        run(triton.start(readiness.is_ready, readiness.probe))
    assert living(tmp_path) == []


def test_cancelled_start_leaves_no_process(tmp_path: Path) -> None:
    triton = server(tmp_path, LIVES.replace("touch up", "touch started"))

    async def main() -> None:
        readiness = Readiness(tmp_path)
        task = asyncio.ensure_future(triton.start(readiness.is_ready, readiness.probe))
        while not (tmp_path / "triton" / "bin" / "started").exists():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    assert not triton.alive
    assert living(tmp_path) == []


def test_death_after_the_start_is_seen(tmp_path: Path) -> None:
    triton, readiness = server(tmp_path, LIVES), Readiness(tmp_path)

    async def main() -> None:
        await triton.start(readiness.is_ready, readiness.probe)
        os.kill(pids(tmp_path)[1], 9)
        while triton.alive:
            await asyncio.sleep(0.01)

    run(main())
    assert living(tmp_path) == []


def test_given_binary_is_used(tmp_path: Path) -> None:
    binary = executable(tmp_path / "opt" / "bin" / "tritonserver", "")
    found = installation.find_installation(tmp_path, binary)
    assert found.binary == binary
    assert found.backend_directory == tmp_path / "opt" / "backends"
    changed = {"PATH", "PYTHONPATH", "VIRTUAL_ENV"}
    kept = {name: value for name, value in os.environ.items() if name not in changed}
    assert kept.items() <= found.environment.items()


def test_given_backends_replace_the_servers_own(tmp_path: Path) -> None:
    binary = executable(tmp_path / "opt" / "bin" / "tritonserver", "")
    backends = tmp_path / "backends"
    with pytest.raises(TritonStartFailed, match=r"TRITONSERVER_BACKEND_DIR='.*': not a directory"):
        installation.find_installation(tmp_path, binary, backends)
    (backends / "mine").mkdir(parents=True)
    assert installation.find_installation(tmp_path, binary, backends).backend_directory == backends


@pytest.mark.parametrize(("minor", "fits"), [(8, False), (10, False), (11, True), (12, True)])
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


@pytest.mark.parametrize("kind", ["missing", "not executable", "a directory"])
def test_binary_must_be_an_executable_file(kind: str, tmp_path: Path) -> None:
    binary = tmp_path / "tritonserver"
    if kind == "not executable":
        binary.write_text("#!/bin/sh\n")
    elif kind == "a directory":
        binary.mkdir()
    with pytest.raises(TritonStartFailed, match=r"TRITONSERVER='.*': not an executable"):
        installation.find_installation(tmp_path, binary)


not_in_an_image = pytest.mark.skipif(
    installation._IMAGE_BINARY.is_file(), reason="an image's own tritonserver comes first"
)


@not_in_an_image
def test_binary_in_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = executable(tmp_path / "opt" / "bin" / "tritonserver", "")
    monkeypatch.setenv("PATH", f"{binary.parent}:{os.environ['PATH']}")
    assert installation.find_installation(tmp_path).binary == binary


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


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGKILL, "its process has ended"), (signal.SIGSTOP, "was stopped")]
)
def test_an_engine_that_dies_while_it_loads_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    body = "echo $$ > started\nmv started pids\nexec sleep 600"
    triton, readiness = server(tmp_path, body, triton_start_timeout=300), Readiness(tmp_path)
    python = executable(tmp_path / "engine" / "python", body)
    triton.engines = EngineFleet(tmp_path, EngineSpec.of("a:b", {}, str(python)))
    files = [tmp_path / "triton" / "bin" / "pids", python.with_name("pids")]

    async def scenario() -> list[int]:
        start = asyncio.ensure_future(triton.start(readiness.is_ready, readiness.probe))
        while not all(file.exists() for file in files):
            await asyncio.sleep(0.01)
        started = [int(file.read_text()) for file in files]
        own, engine = (Path(f"/proc/{pid}/environ").read_bytes() for pid in started)
        assert b"CUDA_VISIBLE_DEVICES=\0" in own
        assert b"CUDA_VISIBLE_DEVICES=0\0" in engine
        os.kill(started[1], number)
        with pytest.raises(TritonStartFailed, match=f"the engine did not load: .*{said}"):
            await start
        return started

    assert not [pid for pid in asyncio.run(asyncio.wait_for(scenario(), 60)) if _runs(pid)]


def port_of(triton: ScriptedServer) -> int:
    return int(triton.url.rpartition(":")[2])


def asked(port: int, question: Callable[[TritonClient], Coroutine[Any, Any, Any]]) -> Any:
    """The answer of the Triton whose HTTP and metrics are at `port`."""
    settings = load_settings().model_copy(
        update={"triton_http_port": port, "triton_metrics_port": port}
    )

    async def main() -> Any:
        async with TritonClient(settings) as client:
            return await question(client)

    return asyncio.run(main())


@pytest.mark.parametrize(("status", "ready"), [("200 OK", True), ("400 Bad Request", False)])
def test_readiness_follows_triton(status: str, ready: bool) -> None:
    with serving([whole(b"", status)]) as triton:
        assert asked(port_of(triton), TritonClient.is_ready) is ready
    assert triton.requests[0].path == "/v2/health/ready"


def test_a_triton_that_does_not_listen_is_not_ready() -> None:
    (port,) = free_ports(1)
    assert asked(port, TritonClient.is_ready) is False
    assert asked(port, TritonClient.active_requests) is None


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
