"""The CPU image, run by a real docker, serves the demo model."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from containers import Container, docker, running, wait_until
from factory import REPOSITORY, VERSION, Image
from resume_clients import Clients

from cog_triton.system.ports import free_ports

QUESTION = {"prompt": "What is the capital of France?", "temperature": 0, "max_tokens": 16}


@pytest.fixture(scope="module")
def server(cpu: Image, engine: Path) -> Iterator[Container]:
    """The image serving /src/engine.tar, with only the documented paths writable."""
    options = [f"--volume={engine}:/src/engine.tar:ro", "--read-only", "--tmpfs=/tmp"]
    options.append("--volume=/opt/cog-triton/work")
    with running(cpu.reference, *options, COG_WEIGHTS="/src/engine.tar") as container:
        container.wait_until_ready()
        yield container


def test_a_prediction_streams(server: Container) -> None:
    events = list(server.stream(**QUESTION))
    texts = [data["chunk"] for event, data, _ in events if event == "output"]
    assert "Paris" in "".join(texts)
    assert len(texts) > 3
    times = [seconds for event, _, seconds in events if event == "output"]
    assert times[0] < times[-1]
    assert events[-1][0] == "completed"
    assert events[-1][1]["status"] == "succeeded"


def test_what_a_cpu_does_not_use_is_left_out(cpu: Image) -> None:
    script = "shopt -s globstar; cd /opt/cog-triton/lib/python*/site-packages; printf '%s\\n' "
    script += "openvino/** numpy/** pytriton/tritonserver/** nvidia_pytriton.libs/**"
    said = docker("run", "--rm", "--network=none", cpu.reference, "bash", "-c", script)
    found = {Path(line) for line in said.splitlines()}
    names = {path.name for path in found}
    assert "libopenvino_intel_cpu_plugin.so" in names
    assert not {"libopenvino_intel_gpu_plugin.so", "libopenvino_intel_npu_plugin.so"} & names
    assert not {path for path in found if path.parts[0] == "numpy" and "tests" in path.parts}
    stubs = {path.parent.name for path in found if path.name == "triton_python_backend_stub"}
    assert stubs == {VERSION}
    assert not any(name.startswith("libpython3") for name in names)


def test_the_address_of_an_image_can_be_loopback(cpu: Image) -> None:
    for address, elsewhere in (("127.0.0.1", False), ("0.0.0.0", True)):
        with running(cpu.reference, COG_HOST=address) as container:
            wait_until(lambda: container.health(), 60)
            for port in (container.ports[0], container.ports[1]):
                with socket.socket() as client:
                    client.settimeout(5)
                    # Also an address of this machine: only a server on all of them is there.
                    assert (client.connect_ex(("127.0.0.2", port)) == 0) is elsewhere


def test_docker_stop_lets_every_stream_end_and_then_ends_all_processes(cpu: Image) -> None:
    (openai,) = free_ports(1)
    settings = {"COG_TRITON_ENGINE": "mock", "MOCK_TPS": "20", "SERVED_MODEL_NAME": "any"}
    settings |= {"OPENAI_PORT": str(openai), "DRAIN_TIMEOUT": "60"}
    with running(cpu.reference, **settings) as container, ThreadPoolExecutor(16) as pool:
        container.wait_until_ready()
        processes = processes_of(container)
        assert any("tritonserver" in line for line in processes.values())
        served = SimpleNamespace(url=container.url, own=f"http://127.0.0.1:{openai}")
        clients = Clients(served)
        kinds = 8 * [clients.predict, clients.stream]
        answers = [pool.submit(ask, number, 160) for number, ask in enumerate(kinds)]
        clients.until_flowing(answers, 16)
        docker("stop", "--time=75", container.id)
        told = {answer.result(10) for answer in answers}
        assert {(one.finish, one.tokens) for one in told} == {("length", 160)}
        assert len(told) == 1
        state = container.state()
        assert (state["ExitCode"], state["OOMKilled"]) == (0, False)
        assert [pid for pid in processes if Path(f"/proc/{pid}").exists()] == []


def processes_of(container: Container) -> dict[int, str]:
    """Command line of each process of a container, by the host's pid."""
    lines = docker("top", container.id, "-eo", "pid,args").splitlines()[1:]
    return {int(pid): line for pid, line in (row.strip().split(maxsplit=1) for row in lines)}


def test_an_engine_directory_can_be_mounted(cpu: Image, engine: Path, tmp_path: Path) -> None:
    subprocess.run(["tar", "-xf", engine, "-C", tmp_path], check=True)
    tmp_path.chmod(0o755)
    mounted = f"--volume={tmp_path}:/src/triton_model_repo/tensorrt_llm/1/:ro"
    with running(cpu.reference, mounted) as container:
        container.wait_until_ready()
        answer = container.predict(**QUESTION)
    assert "Paris" in "".join(answer["output"])


@pytest.mark.parametrize(
    ("sm", "error"),
    [
        ("", "E1306 EngineCorrupt"),
        ("86", "E1305 EngineIncompatible: this image is for sm_86"),
    ],
)
def test_a_start_that_fails_has_a_code(sm: str, error: str, cpu: Image) -> None:
    with running(cpu.reference, COG_TRITON_SM=sm) as container:
        while container.health().get("status") != "SETUP_FAILED":
            assert container.state()["Running"]
        assert error in json.dumps(container.health())


def test_smoke_test_passes_on_the_cpu_image(cpu: Image) -> None:
    environment = {**os.environ, "LOCAL_TEST": "true", "COG_TRITON_IMAGE": cpu.reference}
    command = [sys.executable, "-m", "pytest", "-q", "tests/smoke"]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
