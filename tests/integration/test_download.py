"""Download of a gigabyte over faulty connections, interrupted by SIGKILL."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from range_server import Content, Fault, Span, serving_file

from cog_triton.download.partial_file import PIECE

pytestmark = pytest.mark.integration
SIZE = 1 << 30
CHILD = """
import sys
from pathlib import Path
from cog_triton.download.url_download import fetch
from cog_triton.download.retry import RetryPolicy
policy = RetryPolicy(initial_s=0.01)
fetch(sys.argv[1], Path(sys.argv[2]), sha256=sys.argv[3], retry=policy, echo=print)
(peak,) = [x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x]
print(peak.split()[1])  # getrusage would tell the parent's, if that is larger
"""


def test_a_killed_download_over_faulty_connections_is_resumed(tmp_path: Path) -> None:
    content, target, half = Content(SIZE), tmp_path / "model.tar", threading.Event()
    command = [sys.executable, "-c", CHILD]

    def plan(number: int, span: Span | None) -> Fault | None:
        if number == 40:
            half.set()
        if number % 7 == 3:
            return Fault(status=503)
        if number % 5 == 1:
            return Fault(reset_after=5_000_000)
        return Fault(close_after=9_000_000) if number % 11 == 5 else None

    with serving_file(content, plan) as server:
        command += [f"{server.url}/model.tar", str(target), content.sha256()]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as first:
            try:
                assert half.wait(60)
            finally:
                first.kill()
        assert not target.exists()
        journal = target.with_name("model.tar.partial.journal").read_text()
        done = {int(line) for line in journal.splitlines()[1:]}
        server.requests.clear()
        second = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert target.stat().st_size == SIZE
    asked = {span[0] // PIECE for span in server.requests if span is not None and span != (0, 1)}
    assert len(done) > 5
    assert asked == set(range(SIZE // PIECE)) - done
    assert f"going on after {len(done)} pieces" in second.stdout
    assert int(second.stdout.splitlines()[-1]) < 150_000  # KiB: memory does not grow with the file
