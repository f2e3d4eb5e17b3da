"""The CPU image, run by a real docker, serves the demo model."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
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


def test_many_predictions_at_once(server: Container) -> None:
    # With more than one Tokio thread coglet answers some of these with 409.
    limits = httpx.Limits(max_connections=None)
    body = {"input": {**QUESTION, "max_tokens": 2}}

    async def all_at_once() -> list[int]:
        async with httpx.AsyncClient(limits=limits, timeout=120) as client:
            url = f"{server.url}/predictions"
            answers = [client.post(url, json=body) for _ in range(48)]
            return [answer.status_code for answer in await asyncio.gather(*answers)]

    assert asyncio.run(all_at_once()) == [200] * 48


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


@contextmanager
def network_namespace() -> Iterator[tuple[str, str]]:
    """Another network namespace, joined by a veth pair; its name, and our address in it."""
    name = f"ct{uuid.uuid4().hex[:8]}"
    ours, theirs = f"{name}a", f"{name}b"
    ip = ["ip", "-netns", name]
    commands = [
        ["ip", "netns", "add", name],
        ["ip", "link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name],
        ["ip", "address", "add", "198.18.77.1/30", "dev", ours],
        ["ip", "link", "set", ours, "up"],
        [*ip, "address", "add", "198.18.77.2/30", "dev", theirs],
        [*ip, "link", "set", theirs, "up"],
    ]
    try:
        for command in commands:
            subprocess.run(command, check=True, capture_output=True)
        yield name, "198.18.77.1"
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)
        subprocess.run(["ip", "link", "delete", ours], capture_output=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes network namespaces")
def test_it_is_reached_from_another_network(server: Container) -> None:
    with network_namespace() as (name, address):
        for port, path in zip(server.ports, ("health-check", "v2/health/ready"), strict=False):
            url = f"http://{address}:{port}/{path}"
            fetch = ["ip", "netns", "exec", name, "curl", "-sS", "-o", "/dev/null"]
            done = subprocess.run(
                [*fetch, "-w", "%{http_code}", "--max-time", "10", url],
                capture_output=True,
                text=True,
            )
            assert done.stdout == "200", f"{url}: {done.stderr}"


def test_docker_stop_ends_all_processes(cpu: Image, engine: Path) -> None:
    mounted = f"--volume={engine}:/src/engine.tar:ro"
    with running(cpu.reference, mounted, COG_WEIGHTS="/src/engine.tar") as container:
        container.wait_until_ready()
        pids = processes_of(container)
        assert any("tritonserver" in line for line in pids.values())
        docker("stop", "--time=20", container.id)
        state = container.state()
        assert (state["ExitCode"], state["OOMKilled"]) == (0, False)
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_docker_stop_lets_every_stream_end(cpu: Image) -> None:
    (openai,) = free_ports(1)
    settings = {"COG_TRITON_ENGINE": "mock", "MOCK_TPS": "20", "SERVED_MODEL_NAME": "any"}
    settings |= {"OPENAI_PORT": str(openai), "DRAIN_TIMEOUT": "60"}
    with running(cpu.reference, **settings) as container, ThreadPoolExecutor(16) as pool:
        container.wait_until_ready()
        served = SimpleNamespace(url=container.url, own=f"http://127.0.0.1:{openai}")
        clients = Clients(served)
        kinds = 8 * [clients.predict, clients.stream]
        answers = [pool.submit(ask, number, 160) for number, ask in enumerate(kinds)]
        clients.until_flowing(answers, 16)
        docker("stop", "--time=75", container.id)
        told = {answer.result(10) for answer in answers}
        assert {(one.finish, one.tokens) for one in told} == {("length", 160)}
        assert len(told) == 1
        assert container.state()["ExitCode"] == 0


def processes_of(container: Container) -> dict[int, str]:
    """Command line of each process of a container, by the host's pid."""
    lines = docker("top", container.id, "-eo", "pid,args").splitlines()[1:]
    return {int(pid): line for pid, line in (row.strip().split(maxsplit=1) for row in lines)}


def test_exit_code_is_that_of_the_command(cpu: Image) -> None:
    command = ["docker", "run", "--rm", "--network=none", cpu.reference, "bash", "-c", "exit 7"]
    assert subprocess.run(command).returncode == 7


def test_an_engine_directory_can_be_mounted(cpu: Image, engine: Path, tmp_path: Path) -> None:
    subprocess.run(["tar", "-xf", engine, "-C", tmp_path], check=True)
    tmp_path.chmod(0o755)
    mounted = f"--volume={tmp_path}:/src/triton_model_repo/tensorrt_llm/1/:ro"
    with running(cpu.reference, mounted) as container:
        container.wait_until_ready()
        answer = container.predict(**QUESTION)
    assert "Paris" in "".join(answer["output"])


def test_errors_have_a_code(cpu: Image) -> None:
    with running(cpu.reference) as container:
        while container.health().get("status") != "SETUP_FAILED":
            assert container.state()["Running"]
        assert "E1306 EngineCorrupt" in json.dumps(container.health())


def test_an_image_of_another_gpu_refuses(cpu: Image) -> None:
    with running(cpu.reference, COG_TRITON_SM="86") as container:
        while container.health().get("status") != "SETUP_FAILED":
            assert container.state()["Running"]
        assert "E1305 EngineIncompatible: this image is for sm_86" in json.dumps(container.health())


def test_smoke_test_passes_on_the_cpu_image(cpu: Image) -> None:
    environment = {**os.environ, "LOCAL_TEST": "true", "COG_TRITON_IMAGE": cpu.reference}
    command = [sys.executable, "-m", "pytest", "-q", "tests/smoke"]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
