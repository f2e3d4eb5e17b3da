"""Fake tritonserver in Python: a real process with stubs and a port, and ways to fail."""

from __future__ import annotations

import sys
from pathlib import Path

from cog_triton.settings import Settings, load_settings
from cog_triton.system.ports import free_ports
from cog_triton.triton.server import TritonServer

# Fails as files beside it say; they are checked at each request.
PROGRAM = """
import http.server, json, os, pathlib, subprocess, sys, time
here = pathlib.Path(__file__).parent
port = next(int(word.split("=")[1]) for word in sys.argv if word.startswith("--http-port="))
with (here / "starts").open("a") as starts:
    starts.write(f"{os.getpid()}\\n")
print("I0101 a line of the log", flush=True)
if (here / "dies").exists():
    sys.exit(3)
stub = here / "triton_python_backend_stub"
for model in ("tensorrt_llm", "preprocessing"):
    subprocess.Popen([stub, f"/repository/{model}/1/model.py"])
subprocess.Popen(["sleep", "601"])

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        while (here / "hangs").exists():
            time.sleep(0.01)
        self.answer(400 if (here / "unready").exists() else 200, "application/json", b"")
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if (here / "broken").exists():
            event = b'data: {"error": "CUDA error: device-side assert triggered"}\\n\\n'
            return self.answer(400, "text/event-stream", event)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for _ in range(asked["request_output_len"]):
            while (here / "hangs").exists():
                time.sleep(0.01)
            event = b'data: {"output_ids": 65}\\n\\n'
            self.wfile.write(b"%x\\r\\n%b\\r\\n" % (len(event), event))
            time.sleep(0.005)
        self.wfile.write(b"0\\r\\n\\r\\n")
    def answer(self, status, kind, body):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass

class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
Server(("127.0.0.1", port), Handler).serve_forever()
"""


class FakeTritonServer:
    """One small Triton, its settings, and its failures."""

    def __init__(self, directory: Path, **settings: object) -> None:
        self._bin = directory / "triton" / "bin"
        self._bin.mkdir(parents=True)
        binary = _executable(self._bin / "tritonserver", f"#!{sys.executable}\n{PROGRAM}")
        _executable(self._bin / "triton_python_backend_stub", "#!/bin/sh\nsleep 600 &\nwait\n")
        (port,) = free_ports(1)
        self.settings: Settings = load_settings(
            **{
                "tritonserver": binary,
                "triton_http_port": port,
                "triton_start_timeout": 60,
                "triton_probe_period": 0.05,
                "triton_probe_timeout": 60,  # a late probe would be a failure
                **settings,
            }
        )
        self.server = TritonServer(self.settings, directory / "repository", directory)

    def fail(self, how: str) -> None:
        """Fail from now on: ``dies`` at the next start, ``hangs``, ``unready`` or ``broken``."""
        (self._bin / how).touch()

    def recover(self) -> None:
        """Stop all failures."""
        for how in ("dies", "hangs", "unready", "broken"):
            (self._bin / how).unlink(missing_ok=True)

    @property
    def starts(self) -> list[int]:
        """Process id of each start."""
        file = self._bin / "starts"
        return [int(line) for line in file.read_text().split()] if file.exists() else []


def _executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path
