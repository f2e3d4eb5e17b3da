"""Rolling replacement under load: no request is refused, cut or answered by a mixture."""

import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import venv
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from stack import REPOSITORY, Stack, processes_of, sse, text_of, wait_until
from tritonclient import grpc as grpcclient
from tritonclient.utils import InferenceServerException

from cog_triton.engines.mock.mock_directory import make_engine

pytestmark = pytest.mark.integration

TOKENS = 16
PROMPT = "Go."
SETTINGS = {"MOCK_TPS": "30", "COG_MAX_CONCURRENCY": "100", "DRAIN_TIMEOUT": "20"}


@dataclass
class Engines:
    """Mock engine directories that answer differently: each has its own part of the text."""

    directory: Path

    def make(self, name: str, first: int, **canary: Any) -> Path:
        target = self.directory / name
        shutil.copytree(make_engine(self.directory / "base"), target)
        (target / "cog-triton.json").unlink()
        model = json.loads((target / "mock.json").read_text())
        model["output_ids"] = model["output_ids"][first : first + 8]
        (target / "mock.json").write_text(json.dumps(model))
        ids = (model["output_ids"] * 2)[:10]
        (target / "canary.json").write_text(
            json.dumps({"input_ids": [1, 2], "output_ids": ids, **canary})
        )
        return target


@dataclass
class Rolls:
    """A server with the engine A, and what is rolled to on it."""

    stack: Stack
    engines: Engines
    a: Path
    b: Path

    def start(self, *arguments: str | Path) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "cog_triton", "roll", *map(str, arguments)]
        return subprocess.Popen(
            command,
            env=self.stack.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str | Path) -> tuple[int, str]:
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=300)
        return process.returncode, output

    def text(self) -> str:
        return text_of(self.stack.predict(PROMPT, max_tokens=TOKENS))

    def beside(self, serving: int) -> int:
        """Pid of the Cog server that is started beside `serving`, once there is one."""
        pids = wait_until(lambda: set(self.pids(".http_server")) - {serving})
        return min(pids)

    def pids(self, word: str) -> list[int]:
        found = processes_of(self.stack.work_dir)
        return [pid for pid, line in found.items() if word in line and "reaper.py" not in line]


@pytest.fixture(scope="module")
def rolls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rolls]:
    directory = tmp_path_factory.mktemp("rolling")
    engines = Engines(directory / "engines")
    a, b = engines.make("a", 0), engines.make("b", 40)
    programs = directory / "bin"
    programs.mkdir()
    nvidia_smi = programs / "nvidia-smi"
    nvidia_smi.write_text(
        f"#!/bin/sh\nq=${{1#--query-}}\ncat {directory}/${{q%%=*}}.csv 2>/dev/null || exit 9\n"
    )
    nvidia_smi.chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    stack = Stack(directory / "work", str(a), PATH=path, **SETTINGS)
    with stack.served():
        yield Rolls(stack, engines, a, b)


@dataclass
class Load:
    """Clients that ask one request after the other, on kept connections, until they are told."""

    stack: Stack
    model: str
    texts: dict[str, list[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def streamed_prediction(self, http: httpx.Client) -> str:
        body = {"input": {"prompt": PROMPT, "max_tokens": TOKENS}}
        headers = {"accept": "text/event-stream"}
        with http.stream("POST", f"{self.stack.url}/predictions", json=body, headers=headers) as r:
            events = list(sse(r.iter_lines()))
        assert events[-1][0] == "completed", events[-1:]
        assert events[-1][1]["status"] == "succeeded", events[-1]
        return "".join(data["chunk"] for name, data in events if name == "output")

    def prediction(self, http: httpx.Client) -> str:
        body = {"input": {"prompt": PROMPT, "max_tokens": TOKENS}}
        return text_of(http.post(f"{self.stack.url}/predictions", json=body).json())

    def completion(self, http: httpx.Client) -> str:
        body = {"model": self.model, "prompt": PROMPT, "max_tokens": TOKENS}
        answer = http.post(f"{self.stack.own}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def streamed_completion(self, http: httpx.Client) -> str:
        body = {"model": self.model, "prompt": PROMPT, "max_tokens": TOKENS, "stream": True}
        with http.stream("POST", f"{self.stack.own}/v1/completions", json=body) as answer:
            lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]", lines[-1:]
        chunks = [json.loads(line)["choices"] for line in lines[:-1]]
        return "".join(choices[0]["text"] for choices in chunks if choices)

    def triton(self, http: httpx.Client) -> str:
        body = {"text_input": PROMPT, "max_tokens": TOKENS}
        answer = http.post(f"{self.stack.triton}/v2/models/ensemble/generate", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["text_output"])

    @contextmanager
    def running(self, clients: int = 2) -> Iterator[None]:
        kinds = [self.prediction, self.streamed_prediction, self.completion]
        kinds += [self.streamed_completion, self.triton]
        threads = [threading.Thread(target=self._ask, args=(kind,)) for kind in kinds * clients]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: len(self.texts) == len(kinds) or self.failures)
            assert self.failures == []
            yield
        finally:
            self.stop.set()
            for thread in threads:
                thread.join(60)

    def _ask(self, kind: Callable[[httpx.Client], str]) -> None:
        with httpx.Client(timeout=60) as http:
            while not self.stop.is_set():
                try:
                    self.texts.setdefault(kind.__name__, []).append(kind(http))
                except Exception as error:  # noqa: BLE001 - whatever it is, a client saw it
                    self.failures.append(f"{kind.__name__}: {error!r}")
                    return


def test_no_request_notices_a_roll_under_load(rolls: Rolls) -> None:
    (model,) = httpx.get(f"{rolls.stack.own}/v1/models").json()["data"]
    load = Load(rolls.stack, model["id"])
    old = rolls.text()
    with load.running():
        code, output = rolls.run(rolls.b)
        new = rolls.text()
        made = {kind: len(texts) for kind, texts in load.texts.items()}
        wait_until(
            lambda: load.failures or all(len(load.texts[kind]) >= made[kind] + 3 for kind in made)
        )
    assert load.failures == []
    assert code == 0, output
    assert new != old
    for kind, texts in load.texts.items():
        both = {texts[0], texts[-1]}
        assert len(both) == 2, kind
        assert set(texts) == both, kind
    assert {load.texts["prediction"][0], load.texts["completion"][0]} == {old}
    assert {load.texts["prediction"][-1], load.texts["completion"][-1]} == {new}
    assert "drained" in output
    assert len(rolls.pids(".http_server")) == 1


def test_a_second_roll_is_refused_and_ctrl_c_undoes_the_first(rolls: Rolls) -> None:
    before = rolls.text()
    (serving,) = rolls.pids(".http_server")
    first = rolls.start(rolls.a)
    rolls.beside(serving)
    code, output = rolls.run(rolls.a)
    assert code == 1
    assert "E2113" in output
    assert "is under way" in output
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)
    assert first.returncode == 130
    wait_until(lambda: rolls.pids(".http_server") == [serving])
    assert rolls.text() == before


@pytest.mark.parametrize("failure", ["garbage", "corrupt", "canary", "memory", "python"])
def test_what_cannot_serve_never_gets_a_request(rolls: Rolls, failure: str, tmp_path: Path) -> None:
    before, (serving,) = rolls.text(), rolls.pids(".http_server")
    if failure == "garbage":
        (tmp_path / "engine.tar").write_bytes(os.urandom(4096))
        asked, code = [tmp_path / "engine.tar"], "E1306"
    elif failure == "corrupt":
        engine = rolls.engines.make("corrupt", 0)
        (engine / "mock.json").write_text("{}")
        asked, code = [engine], "E1306"
    elif failure == "canary":
        asked, code = [rolls.engines.make("other", 80, output_ids=[1, 2, 3])], "E2112"
    elif failure == "memory":
        engine = rolls.engines.make("huge", 0)
        with (engine / "weights").open("wb") as file:
            file.truncate(1 << 43)
        asked, code = [engine], "E2113"
    else:
        asked, code = ["--python", "/bin/false"], "E1005"
    status, output = rolls.run(*map(str, asked))
    assert status == 1
    assert code in output
    if failure == "memory":
        assert "needs about 8192." in output
        assert "are free" in output
    assert rolls.pids(".http_server") == [serving]
    assert rolls.text() == before


def test_a_gpu_without_memory_for_both_refuses_a_roll(rolls: Rolls) -> None:
    (serving,) = rolls.pids(".http_server")
    (engine,) = rolls.pids("engine_process")
    apps, gpus = (
        rolls.engines.directory.parent / f"{name}.csv" for name in ("compute-apps", "gpu")
    )
    apps.write_text(f"GPU-b, {engine}, 71680\nGPU-a, 1, 5000\n")
    gpus.write_text("GPU-a, 0, 5000, 76559\nGPU-b, 1, 71690, 9869\n")
    try:
        status, output = rolls.run(rolls.a)
    finally:
        apps.unlink()
        gpus.unlink()
    assert status == 1
    told = " ".join(output.split())
    assert "E2113" in told
    assert "memory of GPU 1: the new engine needs about 70.0 GiB beside the old one" in told
    assert "9.6 are free" in told
    assert rolls.pids(".http_server") == [serving]


def test_a_full_disk_stops_a_roll_before_the_switch(rolls: Rolls) -> None:
    before, (serving,) = rolls.text(), rolls.pids(".http_server")
    engine = rolls.engines.make("larger", 0)
    (engine / "weights").write_bytes(os.urandom(24 << 20))
    tar = engine.with_suffix(".tar")
    with tarfile.open(tar, "w") as file:
        for path in engine.iterdir():
            file.add(path, path.name)
    engines = rolls.stack.work_dir / "engines"
    engines.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(engines)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        status, output = rolls.run(tar)
        left = [*engines.iterdir()]
    finally:
        subprocess.run(["umount", str(engines)], check=True)
    assert status == 1
    assert "E2302" in output
    assert left == []
    assert rolls.pids(".http_server") == [serving]
    assert rolls.text() == before


def generated(client: grpcclient.InferenceServerClient, tokens: int) -> str:
    """The text that Triton's own gRPC port answers; raises what ends the stream before."""
    text = grpcclient.InferInput("text_input", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([[PROMPT.encode()]], dtype=object))
    size = grpcclient.InferInput("max_tokens", [1, 1], "INT32")
    size.set_data_from_numpy(np.array([[tokens]], dtype=np.int32))
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    try:
        client.async_stream_infer("ensemble", [text, size], enable_empty_final_response=True)
        found = b""
        while True:
            result, error = answers.get(timeout=120)
            if error is not None:
                raise error
            if (part := result.as_numpy("text_output")) is not None:
                found += part.item()
            if result.get_response().parameters["triton_final_response"].bool_param:
                return found.decode().removeprefix(PROMPT)
    finally:
        client.stop_stream()


def test_grpc_clients_reach_the_new_engine_over_the_channel_that_they_have(rolls: Rolls) -> None:
    old, address = rolls.text(), f"127.0.0.1:{rolls.stack.grpc}"
    texts: list[str] = []
    errors: list[str] = []
    rolled = threading.Event()

    def ask(client: grpcclient.InferenceServerClient, tokens: int) -> None:
        try:
            texts.append(generated(client, tokens))
        except InferenceServerException as error:
            errors.append(str(error))
            time.sleep(0.2)

    def ask_on() -> None:
        with grpcclient.InferenceServerClient(address) as client:
            while not rolled.is_set():
                ask(client, TOKENS)

    with grpcclient.InferenceServerClient(address) as kept:
        assert generated(kept, TOKENS) == old
        with grpcclient.InferenceServerClient(address) as other:
            threads = [
                threading.Thread(target=ask_on),
                threading.Thread(target=ask, args=(other, 100_000)),
            ]
            for thread in threads:
                thread.start()
            code, output = rolls.run(rolls.engines.make("c", 20))
            rolled.set()
            for thread in threads:
                thread.join(60)
        assert code == 0, output
        new = rolls.text()
        assert new != old
        assert generated(kept, TOKENS) == new
    assert set(texts) <= {old, new}
    assert old in texts
    # What runs, or comes over an old connection, while the old Triton stops.
    assert errors
    for error in errors:
        assert re.search("E2105|UNAVAILABLE|no available versions|stopping", error), error


def later_python(directory: Path) -> Path:
    """A Python that has version 99 of this package, installed from a wheel."""
    wheel = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(wheel, cwd=REPOSITORY, check=True, capture_output=True)
    venv.create(directory / "venv", symlinks=True)
    python = directory / "venv" / "bin" / "python"
    (packages,) = directory.glob("venv/lib/python*/site-packages")
    with zipfile.ZipFile(*directory.glob("*.whl")) as file:
        file.extractall(packages)
    (packages / "cog_triton" / "__init__.py").write_text('__version__ = "99.0"\n')
    # What the package needs is the same, but for the checkout that our own has in the place of it.
    (packages / "others.pth").write_text(f"{Path(httpx.__file__).parents[1]}\n")
    return python


def test_a_second_installation_takes_over(rolls: Rolls, tmp_path: Path) -> None:
    before, python = rolls.text(), later_python(tmp_path)
    code, output = rolls.run("--python", python)
    assert code == 0, output
    assert rolls.text() == before
    for word in (".http_server", "engine_process", "keeper_process"):
        (pid,) = rolls.pids(word)
        assert Path(f"/proc/{pid}/cmdline").read_text().startswith(str(python)), word


def test_a_new_engine_that_dies_while_starting_leaves_the_old_one(rolls: Rolls) -> None:
    before, (serving,) = rolls.text(), rolls.pids(".http_server")
    process = rolls.start(rolls.a)
    os.kill(rolls.beside(serving), signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "E2106" in output
    assert rolls.pids(".http_server") == [serving]
    assert rolls.text() == before


def test_an_old_engine_that_dies_while_draining_costs_its_own_requests_alone(
    rolls: Rolls,
) -> None:
    (serving,) = rolls.pids(".http_server")
    with rolls.stack.stream(PROMPT, max_tokens=2000) as events:
        next(events)
        process = rolls.start(rolls.a)
        assert process.stdout is not None
        wait_until(lambda: "switched" in process.stdout.readline())
        os.kill(serving, signal.SIGKILL)
        assert list(events)[-1][1]["error"].startswith("E2105")
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert serving not in rolls.pids(".http_server")
    assert rolls.stack.health() == "READY"
    assert rolls.text()


def test_the_server_drains_and_ends_as_ever_after_rolls(rolls: Rolls) -> None:
    """The request runs for 10 s, so that it is seen in the engine."""
    answers = []

    def ask() -> None:
        answers.append(text_of(rolls.stack.predict(PROMPT, max_tokens=300)))

    asking = threading.Thread(target=ask)
    wait_until(lambda: not rolls.stack.engine_requests())  # of the test before
    asking.start()
    wait_until(lambda: rolls.stack.engine_requests())
    code, output = rolls.stack.finish(signal.SIGTERM)
    asking.join(60)
    assert code == 0, output
    assert answers
    assert answers[0]
    wait_until(lambda: not processes_of(rolls.stack.work_dir))
    assert not list(rolls.stack.work_dir.glob("drain-*"))
