"""tests/gpu on several GPUs: killed workers, newer source, detached runs, tables."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from script_modules import GPU, ROOT, imported

MODULES = (
    "prompts", "endpoints", "killed_worker", "newer_source", "detached", "table", "multicast",
    "adapters", "start_marks",
)  # fmt: skip
DETACHED = ROOT / "scripts" / "run-detached"
PATIENCE_S = 60


@pytest.fixture(scope="module")
def gpu() -> Iterator[SimpleNamespace]:
    with imported((*GPU, "tests/gpu/image"), MODULES) as modules:
        yield modules


class Scripted(threading.Thread):
    """A server of completions: each connection gets what its prompt says, and then that."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.release = threading.Event()
        self._open: list[socket.socket] = []
        self.start()

    def run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._open.append(connection)
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        asked = connection.recv(65536)
        kind = json.loads(asked.partition(b"\r\n\r\n")[2])["prompt"]
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + event("a"))
        self.release.wait(PATIENCE_S)
        if kind == "hung":
            return
        if kind == "error":
            told = {"error": {"message": "E2105 EngineDied: it died", "code": "E2105"}}
            connection.sendall(f"data: {json.dumps(told)}\n\n".encode())
        elif kind != "cut":
            connection.sendall(event("X" if kind == "wrong" else "b"))
            usage = {"prompt_tokens": 1, "completion_tokens": 2}
            connection.sendall(event("", usage) + b"data: [DONE]\n\n")
        connection.close()

    def close(self) -> None:
        self._socket.close()
        for connection in self._open:
            connection.close()


def event(text: str, usage: dict[str, int] | None = None) -> bytes:
    told = {"choices": [] if usage else [{"text": text}], "usage": usage}
    return f"data: {json.dumps(told)}\n\n".encode()


def test_streams_over_a_killed_worker_are_told_apart(gpu: SimpleNamespace) -> None:
    server = Scripted()
    kinds = ["whole", "wrong", "error", "cut", "hung"]
    prompts = [gpu.prompts.Prompt(kind, [1]) for kind in kinds]
    struck: list[bool] = []

    async def strike() -> None:
        struck.append(True)
        server.release.set()

    endpoint = gpu.endpoints.Endpoint("it", server.port)
    run = gpu.killed_worker.run(endpoint, prompts, 2, 10, strike)
    streams = asyncio.run(run)
    server.close()
    assert struck == [True]
    assert [stream.ended for stream in streams] == ["whole", "whole", "E2105", "cut", "hung"]
    expected = [gpu.killed_worker.Stream(text="ab") for _ in kinds]
    judged = gpu.killed_worker.judge(streams, expected)
    del judged["longest_pause_s"]
    assert judged == {
        "streams": 5,
        "whole": 2,
        "same": 1,
        "wrong": 1,
        "hung": 1,
        "lost": 2,
        "lost_by": {"E2105": 1, "cut": 1},
        "of_these_the_text_so_far_is_right": 3,
    }


def test_the_eldest_process_that_computes_is_killed(gpu: SimpleNamespace) -> None:
    sleep = [sys.executable, "-c", "input()"]
    with subprocess.Popen(sleep, stdin=subprocess.PIPE) as older:
        time.sleep(0.05)  # starts are told in hundredths of a second
        younger = subprocess.Popen(sleep, stdin=subprocess.PIPE)
        roles = {younger.pid: "vLLM EngineCore", older.pid: "vLLM EngineCore", 1: "tritonserver"}
        server = SimpleNamespace(processes=lambda: roles)
        found = gpu.killed_worker.victim(server)
        among = gpu.killed_worker.victim(server, [younger.pid])
        older.kill()
        younger.communicate()
    assert found == ("vLLM EngineCore", older.pid)
    assert among == ("vLLM EngineCore", younger.pid)
    roles.clear()
    with pytest.raises(RuntimeError, match="no engine among"):
        gpu.killed_worker.victim(server)


def test_newer_source_replaces_the_images_layer(gpu: SimpleNamespace, tmp_path: Path) -> None:
    site = tmp_path / "root" / gpu.newer_source.SITE / "cog_triton"
    kept = tmp_path / "layer.py"
    kept.write_text("old")
    (site / "gone").mkdir(parents=True)
    os.link(kept, site / "__init__.py")
    os.link(kept, site / "gone" / "module.py")
    (site / "gone").chmod(0o555)
    (tmp_path / "root/src/.cog").mkdir(parents=True)
    told = gpu.newer_source.lay_over(tmp_path / "root")
    assert (site / "__init__.py").read_bytes() == (ROOT / "cog_triton/__init__.py").read_bytes()
    assert (site / "_data/runner/predict.py").is_file()
    assert (site / "_data/triton_model_repo/tensorrt_llm/1/.gitkeep").is_file()
    assert (tmp_path / "root/src/.cog/openapi_schema.json").is_file()
    assert (tmp_path / "root/src/triton_model_repo/ensemble/config.pbtxt").is_file()
    assert not (site / "gone").exists()
    assert kept.read_text() == "old"
    assert told["gone"] == 1
    assert told["changed"] == told["files"]
    assert gpu.newer_source.lay_over(tmp_path / "root")["changed"] == 0


def detached(
    root: Path, seconds: int, *command: str, out: Path
) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "OUT": str(out)}
    return subprocess.run(
        [str(DETACHED), str(root), str(seconds), *command],
        capture_output=True, text=True, env=environment, timeout=PATIENCE_S,
    )  # fmt: skip


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """A root, and a directory for results."""
    out = tmp_path / "out"
    out.mkdir()
    return tmp_path / "root", out


def test_a_detached_command_is_followed_to_its_end(places: tuple[Path, Path]) -> None:
    root, out = places
    script = "ls tests/gpu/results.py; echo 1 >$OUT/results.json; sleep 2; echo last; exit 3"
    first = detached(root, 0, "sh", "-c", script, out=out)
    assert first.returncode == 0
    assert "it still runs" in first.stdout
    again = detached(root, 0, "true", out=out)
    assert again.returncode == 1
    assert "a command still runs" in again.stderr
    last = detached(root, 50, out=out)
    assert (last.returncode, "last" in last.stdout) == (3, True)
    shown = first.stdout + last.stdout
    assert shown.count("tests/gpu/results.py") == 1
    assert (out / "results.json").read_text() == "1\n"
    assert (out / "logs.tgz").is_file()


def test_a_detached_command_is_stopped_by_sigterm(places: tuple[Path, Path]) -> None:
    root, out = places
    script = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(5)); "
    script += "print('ready', flush=True); time.sleep(90)"
    shown = detached(root, 0, sys.executable, "-c", script, out=out).stdout
    deadline = time.monotonic() + PATIENCE_S
    while "ready" not in shown and time.monotonic() < deadline:
        shown += detached(root, 0, out=out).stdout
    stopped = detached(root, 50, "stop", out=out)
    assert (stopped.returncode, "it has ended" in stopped.stdout) == (5, True)


def test_multicast_that_is_left_on_is_told(gpu: SimpleNamespace) -> None:
    off = dict(gpu.multicast.OFF)
    on = {**off, "NCCL_NVLS_ENABLE": "1"}
    told = [f"--env={name}={value}" for name, value in off.items()]
    for role, words, environment, count in (
        ("vLLM EngineCore", [], off, 0),
        ("vLLM EngineCore", [], on, 1),
        ("vLLM EngineCore", [], {}, 1),
        ("container", told, on, 0),
        ("container", told[1:], off, 1),
        ("chat templates", [], {"LANG": "C"}, 1),  # no engine says
    ):
        command = ["/bin/sh", "-c", "echo; read line", *words]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()  # before it runs, it has no environment
            server = SimpleNamespace(processes=lambda p=process, r=role: {p.pid: r})
            found = gpu.multicast.left_on(server)
            process.kill()
        assert len(found) == count, found


def test_adapters_are_what_we_take(gpu: SimpleNamespace, tmp_path: Path) -> None:
    from cog_triton.artifact.lora_adapter import LoRALimits, check_adapter, read_adapter

    small = tmp_path / "small"
    small.mkdir()
    config = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    (small / "config.json").write_text(json.dumps(config))
    (small / "model.json").write_text("{}")
    made = gpu.adapters.with_adapters(small, tmp_path / "made", {"x": 1}, ROOT / "LICENSE")
    assert json.loads((made / "model.json").read_text())["enable_lora"] is True
    assert (small / "model.json").read_text() == "{}"
    limits = LoRALimits(max_rank=8, max_loras=2, hidden_size=64, layers=2)
    named = json.loads((made / "multi_lora.json").read_text())
    assert set(named) == set(gpu.adapters.NAMES)
    for path in named.values():
        check_adapter(read_adapter(Path(path)), limits)


def row(tokens_per_s: float) -> dict[str, Any]:
    times = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "tpot_p50")
    names = (*times, "cores", "load_lag_p99", "load_cores")
    return {"tokens_per_s": tokens_per_s, "rounds": 1, **dict.fromkeys(names, 1.0)}


def test_tables_of_several_gpus(gpu: SimpleNamespace) -> None:
    judged = {"streams": 64, "whole": 0, "same": 0, "wrong": 0, "hung": 0, "lost": 64}
    judged |= {"lost_by": {"E2105": 64}, "longest_pause_s": 0.1}
    back = {"not_ready_s": 0.3, "ready_s": 70.0, "first_token_s": None}
    many = {"vllm serve, Rust": {"64": row(100)}, "/v1": {"64": row(90)}}
    results = {
        "many": {"medians": many, "ours: start": {"seconds": 200.1}},
        "pair": {"medians": {"/v1": {"64": row(180)}}},
        "kill": {"killed": "vLLM worker, one of 8", "streams": judged, "return": back},
        "replicas": {
            **{"medians": {"/v1": {"64": row(189)}}, "streams": judged},
            **{"killed": "vLLM EngineCore, one of 2", "return": dict.fromkeys(back, 0.2)},
        },
    }
    made = gpu.table.sections(results)
    assert "| two engines, /v1 | 64 | 180 | 1 | 2.000 |" in made["two engines' benchmark"]
    assert "| two of our choice, /v1 | 64 | 189 | 1 | 2.100 |" in made["two engines' benchmark"]
    assert made["killed engine of two"].endswith("| 64 | 0.1 | E2105: 64 | 0.2 | 0.2 | 0.2 |")
    assert "| one engine, /v1 | 64 | 90 | 1 | 1.000 |" in made["two engines' benchmark"]
    assert "| /v1 | 64 | 90 | 1 | 0.900 |" in made["many GPUs' benchmark"]
    assert "| 64 | 0.1 | E2105: 64 | 0.3 | 70.0 | - |" in made["killed worker"]
    assert "| ours | 200.1 | - |" in made["many GPUs' starts"]


def test_the_marks_of_a_start_are_the_lines_of_its_logs(
    gpu: SimpleNamespace, tmp_path: Path
) -> None:
    log = tmp_path / "serve.log"
    log.write_text("")
    engine = tmp_path / "work" / "run" / "7" / "engine-1.log"
    engine.parent.mkdir(parents=True)
    marks = gpu.start_marks.Marks(SimpleNamespace(log=log, began=time.monotonic()))
    marks.start()
    engine.write_text("INFO vLLM 0.33.0 is imported\nModel loading took 1 GiB")
    deadline = time.monotonic() + PATIENCE_S
    while "imported" not in marks.seen:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with engine.open("a") as file:
        file.write(" memory and 2.5 seconds\nEngineCore: imported in 9.10 s, then waited 0.20 s\n")
    marks.end()
    assert marks.seen.keys() == {"imported", "loaded"}
    assert marks.seen["imported"] <= marks.seen["loaded"]
    assert marks.text.count("Model loading took") == 1
