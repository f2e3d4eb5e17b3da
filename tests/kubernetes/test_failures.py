"""What breaks in a pod, and who notices: the server itself, or Kubernetes."""

from __future__ import annotations

from clients import Clients
from kubectl import Report
from release import Release
from stack import wait_until

FIND = """
import os, pathlib, signal, time
def found(mark):
    for pid in sorted(int(path.name) for path in pathlib.Path("/proc").glob("[0-9]*")):
        try:
            command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if pid not in (1, os.getpid()) and mark in command:
            return pid
"""
ENGINE = b"cog_triton.backend.engine_process"
SERVER = b"cog_triton.front.server"
_STOP_UNTIL_REPLACED = (
    FIND
    + """
server = found(%r)
os.kill(server, signal.SIGSTOP)
while found(%r) in (None, server):
    time.sleep(0.1)
"""
)
_OUT_OF_MEMORY = (
    FIND
    + """
engine = found(%r)
pathlib.Path(f"/proc/{engine}/oom_score_adj").write_text("1000")  # the kernel takes it first
hog = pathlib.Path("/dev/shm/hog")
with hog.open("wb", buffering=0) as file:
    try:
        for _ in range(4096):
            file.write(bytes(2**20))
            if not pathlib.Path(f"/proc/{engine}/exe").exists() or found(%r) != engine:
                print("killed")
                break
    finally:
        hog.unlink()
"""
)


def test_a_server_that_hangs_is_replaced(release: Release, report: Report) -> None:
    first = release.ready()[0]
    before = release.restarts(first)
    with (
        Clients(release.address) as clients,
        report.operation("server stopped (SIGSTOP)", clients) as row,
    ):
        clients.wait()
        release.execute(first, _STOP_UNTIL_REPLACED % (SERVER, SERVER))
        wait_until(release.all_ready, 600)
        clients.wait()
        row.append("its parent starts another in the same container")
    assert release.restarts(first) == before
    assert len(clients.lost) <= 4, clients.lost  # those that ran there


def test_an_engine_for_want_of_memory(release: Release, report: Report) -> None:
    first = release.ready()[0]
    before = release.restarts(first)
    with (
        Clients(release.address) as clients,
        report.operation("the kernel kills the engine for want of memory", clients) as row,
    ):
        clients.wait()
        assert "killed" in release.execute(first, _OUT_OF_MEMORY % (ENGINE, ENGINE))
        clients.wait(16)
        wait_until(release.all_ready, 600)
        anew = release.restarts(first) - before
        row.append(f"the server starts another; containers made anew: {anew}")
    assert clients.lost == [] if anew == 0 else len(clients.lost) <= 4, clients.lost
