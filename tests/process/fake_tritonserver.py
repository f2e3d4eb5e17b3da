"""Fake tritonserver in Python: a real process with stubs and a port, and ways to fail."""

from __future__ import annotations

import sys
from pathlib import Path

from cog_triton.processes.parent_link import ParentLink
from cog_triton.settings import Settings, load_settings
from cog_triton.system.ports import free_ports
from cog_triton.triton.server import TritonServer

# Fails as files beside it say; they are checked at each request. Its metrics count as many requests
# of others as "others" says, and say nothing if that is blank.
PROGRAM = r"""
import http.server, os, pathlib, subprocess, sys, threading, time
here = pathlib.Path(__file__).parent
options = dict(word.split("=", 1) for word in sys.argv if "=" in word)
with (here / "starts").open("a") as starts:
    starts.write(f"{os.getpid()}\n")
print("I0101 a line of the log", flush=True)
if (here / "dies").exists():
    sys.exit(3)
stub = here / "triton_python_backend_stub"
for model in ("tensorrt_llm", "preprocessing"):
    subprocess.Popen([stub, f"/repository/{model}/1/model.py"])
subprocess.Popen(["sleep", "601"])

sys.path[:0] = SYS_PATH
from scripted_triton import ScriptedTriton, event

def hang():
    while (here / "hangs").exists():
        time.sleep(0.01)

running = set()

def answer(request):
    if (here / "broken").exists():
        yield event(error="CUDA error: device-side assert triggered")
        return
    running.add(request)
    for left in reversed(range(request.values["request_output_len"])):
        hang()
        if not left or request.left.is_set():
            running.discard(request)
        yield event(output_ids=65)
        time.sleep(0.005)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        hang()
        self.send_response(400 if (here / "unready").exists() else 200)
        self.end_headers()
        if self.path == "/metrics":
            labels = 'model="tensorrt_llm",request_type="active",version="1"'
            if others := (here / "others").read_text():
                text = "nv_trt_llm_request_metrics{%s} %d\n" % (labels, len(running) + int(others))
                self.wfile.write(text.encode())
    def log_message(self, *_):
        pass

class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

address = f"{options['--grpc-address']}:{options['--grpc-port']}"
with ScriptedTriton(answer, address) as triton:
    metrics = Server(("127.0.0.1", int(options["--metrics-port"])), Handler)
    threading.Thread(target=metrics.serve_forever, daemon=True).start()
    Server(("127.0.0.1", int(options["--http-port"])), Handler).serve_forever()
"""


class FakeTritonServer:
    """One small Triton, its settings, and its failures."""

    def __init__(self, directory: Path, parent: ParentLink, **settings: object) -> None:
        self._bin = directory / "triton" / "bin"
        self._bin.mkdir(parents=True)
        program = PROGRAM.replace("SYS_PATH", repr([path for path in sys.path if path]))
        binary = _executable(self._bin / "tritonserver", f"#!{sys.executable}\n{program}")
        self.use("0")
        _executable(self._bin / "triton_python_backend_stub", "#!/bin/sh\nsleep 600 &\nwait\n")
        http, metrics = free_ports(2)
        self.settings: Settings = load_settings(
            **{
                "tritonserver": binary,
                "triton_http_port": http,
                "triton_metrics_port": metrics,
                "cog_triton_keys": "keys",  # no relay, which would need a port
                "triton_start_timeout": 60,
                **settings,
            }
        )
        self.server = TritonServer(self.settings, directory / "repository", parent)

    def fail(self, how: str) -> None:
        """Fail from now on: ``dies`` at the next start, ``hangs``, ``unready`` or ``broken``."""
        (self._bin / how).touch()

    def recover(self) -> None:
        """Stop all failures."""
        for how in ("dies", "hangs", "unready", "broken"):
            (self._bin / how).unlink(missing_ok=True)

    def use(self, others: str) -> None:
        """Have so many requests of others run in its engine; with none, none are counted."""
        (self._bin / "others").write_text(others)

    @property
    def starts(self) -> list[int]:
        """Process id of each start."""
        file = self._bin / "starts"
        return [int(line) for line in file.read_text().split()] if file.exists() else []


def _executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path
