"""Builder predictions: the real Cog, configs over HTTP, the real demo engine."""

import base64
import http.client
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from http_replies import while_serving
from stack import REPOSITORY, Stack, pid_of, processes_of, wait_until

from cog_triton.artifact.engine_tar import unpack
from cog_triton.builder.config import load_config

pytestmark = pytest.mark.integration

RUNNING = ("starting", "processing")
DEMO = REPOSITORY / "configs" / "build" / "smollm2-135m-cpu.yaml"


FAKE_BUILD = """
import argparse, json, os, pathlib
argparse.ArgumentParser().parse_args()
print("my token is", os.environ.get("HF_TOKEN"))
out = pathlib.Path("engine"); out.mkdir()
(out / "rank0.engine").write_text("plan")
limits = {"max_input_len": 3, "max_seq_len": 4, "max_batch_size": 2}
model = {"architecture": "LlamaForCausalLM", "dtype": "float16",
    "mapping": {"tp_size": 1, "pp_size": 1, "world_size": 1}}
config = {"version": "1.2.1", "pretrained_config": model, "build_config": limits}
(out / "config.json").write_text(json.dumps(config))
"""


SLOW_QUANTIZE = """
import argparse, os, pathlib, subprocess, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--seconds")
seconds = parser.parse_args().seconds
pathlib.Path("quantized").mkdir()
pathlib.Path("quantized/w").write_text("half")
sleep = "import sys, time; time.sleep(float(sys.argv[1]))"
child = subprocess.Popen([sys.executable, "-c", sleep, seconds])
while child.poll() is None:
    print("working", flush=True)
    time.sleep(0.1)
"""


class Neighbour(SimpleHTTPRequestHandler):
    """Serves configs/build as `python3 -m http.server` does; keeps what is PUT or POSTed to it."""

    kept: list[tuple[str, bytes]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, directory=str(DEMO.parent))

    def do_PUT(self) -> None:
        self.kept.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    do_POST = do_PUT  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass

    @classmethod
    def log_of(cls, prediction: str) -> str:
        """The log of a prediction as its webhooks have told it so far."""
        return "".join(body.get("logs", "") for body in cls._told(prediction)[-1:])

    @classmethod
    def end_of(cls, prediction: str) -> dict[str, Any] | None:
        ended = [body for body in cls._told(prediction) if body["status"] not in RUNNING]
        return ended[0] if ended else None

    @classmethod
    def _told(cls, prediction: str) -> list[dict[str, Any]]:
        return [json.loads(body) for path, body in cls.kept if path == f"/hook/{prediction}"]


@pytest.fixture(scope="module")
def neighbour() -> Iterator[str]:
    with while_serving(ThreadingHTTPServer(("127.0.0.1", 0), Neighbour)) as url:
        yield url


def start_builder(directory: Path, *arguments: str, **environment: str) -> Stack:
    (directory / "out").mkdir(parents=True)
    builder = Stack(
        directory / "work",
        None,
        COG_PREDICT_TYPE_STUB="predict.py:Predictor",
        COG_TRITON_OUTPUT_DIR=str(directory / "out"),
        **environment,
    )
    builder.command = [sys.executable, "-m", "cog_triton.serve", "--cog-only", *arguments]
    builder.cwd = REPOSITORY / "builder"
    builder.start()
    return builder


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TensorRT-LLM's sources with a family of two steps, the first of which takes its time."""
    directory = tmp_path_factory.mktemp("sources")
    family = directory / "examples" / "fake"
    family.mkdir(parents=True)
    (family / "quantize.py").write_text(SLOW_QUANTIZE)
    (family / "build.py").write_text(FAKE_BUILD)
    (directory / "model.gguf").write_text("weights")
    return directory


def slow_config(examples: Path, seconds: float = 600) -> str:
    """A build of which a step takes so long, as text."""
    quantize = {
        "script": "quantize.py",
        "output_dir": "quantized",
        "args": {"seconds": seconds},
    }
    config = {
        "model_id": str(examples / "model.gguf"),
        "example_name": "fake",
        "quantize": quantize,
        "build": {"script": "build.py", "output_dir": "engine"},
    }
    return yaml.safe_dump(config, sort_keys=False)


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory, examples: Path) -> Iterator[Stack]:
    running = start_builder(tmp_path_factory.mktemp("builder"), TRTLLM_DIR=str(examples))
    try:
        wait_until(lambda: running.health() == "READY")
        yield running
    finally:
        running.close()


@pytest.fixture
def make_builder(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    made: list[Stack] = []

    def make(*arguments: str, **environment: str) -> Stack:
        made.append(start_builder(tmp_path, *arguments, **environment))
        return made[-1]

    yield make
    for builder in made:
        builder.close()


def predict(builder: Stack, **inputs: Any) -> dict[str, Any]:
    def answered() -> httpx.Response | None:  # Cog frees its slot after it has answered
        url = f"{builder.url}/predictions"
        response = httpx.post(url, json={"input": inputs}, timeout=300)
        return None if response.status_code == 503 else response

    answer: dict[str, Any] = wait_until(answered, 300).json()
    return answer


def begin(builder: Stack, neighbour: str, prediction: str, **inputs: Any) -> None:
    """Start a prediction that goes on after this call, and tells the neighbour about itself."""

    def accepted() -> bool:
        response = httpx.put(
            f"{builder.url}/predictions/{prediction}",
            json={
                "input": inputs,
                "webhook": f"{neighbour}/hook/{prediction}",
                "webhook_events_filter": ["logs", "completed"],
            },
            headers={"Prefer": "respond-async"},
        )
        return response.status_code == 202

    wait_until(accepted)


def in_a_step(builder: Stack) -> bool:
    return any("quantize.py" in line for line in processes_of(builder.work_dir).values())


@pytest.mark.full
def test_config_over_http_is_built_and_uploaded(
    builder: Stack, neighbour: str, engine_tar: Path, tmp_path: Path
) -> None:
    answer = predict(builder, config=f"{neighbour}/{DEMO.name}")
    assert answer["status"] == "succeeded", answer
    made = Path(answer["output"])
    assert made == builder.work_dir.parent / "out" / "engine.tar"
    assert made.read_bytes() == engine_tar.read_bytes()  # which the runner's tests serve
    manifest = unpack(made, tmp_path / "engine")
    assert manifest is not None
    assert manifest.engine == "openvino"
    assert manifest.model_id == load_config(DEMO).model_id
    lines = [line for line in answer["logs"].splitlines() if not line.startswith("[step ")]
    steps = [line.partition("]")[0] for line in lines]
    assert list(dict.fromkeys(steps)) == [
        f"[{name}" for name in ("config", "check", "model", "build", "package", "done")
    ]

    # Again, and sent away: nothing is done twice.
    answer = predict(
        builder, config=DEMO.as_uri(), upload_url=f"{neighbour}/e.tar?signature=secret"
    )
    assert answer["status"] == "succeeded", answer
    assert answer["output"] == f"{neighbour}/e.tar"
    assert "[build] already done" in answer["logs"]
    assert "[upload] 100% of 153 MB" in answer["logs"]
    assert "secret" not in answer["logs"]
    ((path, body),) = [item for item in Neighbour.kept if not item[0].startswith("/hook")]
    assert path == "/e.tar?signature=secret"
    assert body == engine_tar.read_bytes()
    assert "secret" not in builder.output


@pytest.mark.full
def test_cog_with_upload_url_gets_the_file(
    make_builder: Callable[..., Stack], neighbour: str, tmp_path: Path
) -> None:
    family = tmp_path / "TensorRT-LLM" / "examples" / "fake"
    family.mkdir(parents=True)
    (family / "build.py").write_text(FAKE_BUILD)
    (tmp_path / "model.gguf").write_text("weights")
    config = f"model_id: {tmp_path}/model.gguf\nexample_name: fake\n"
    config += "build: {script: build.py, output_dir: engine}\n"
    builder = make_builder(
        "--upload-url", f"{neighbour}/uploads/", TRTLLM_DIR=str(tmp_path / "TensorRT-LLM")
    )
    wait_until(lambda: builder.health() == "READY")
    answer = predict(builder, config=config, hf_token="hf_verysecret")
    assert answer["status"] == "succeeded", answer
    assert "[build] my token is ***" in answer["logs"]
    assert answer["output"] == f"{neighbour}/uploads/engine.tar"
    (body,) = [body for path, body in Neighbour.kept if path == "/uploads/engine.tar"]
    assert body == (tmp_path / "out" / "engine.tar").read_bytes()
    kept = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"hf_verysecret" in text for text in [*kept, builder.output.encode()])


def test_cancel_ends_every_process_of_the_build(
    builder: Stack, neighbour: str, examples: Path
) -> None:
    idle = processes_of(builder.work_dir)
    begin(builder, neighbour, "cancelled", config=slow_config(examples))
    wait_until(lambda: in_a_step(builder))
    # The log is told while the build runs, and another build waits for this one's end.
    wait_until(lambda: "[quantize] working" in Neighbour.log_of("cancelled"))
    assert Neighbour.end_of("cancelled") is None
    again = httpx.post(f"{builder.url}/predictions", json={"input": {"config": "/nowhere"}})
    assert (again.status_code, "E2107" in again.text) == (503, True)
    httpx.post(f"{builder.url}/predictions/cancelled/cancel").raise_for_status()
    end = wait_until(lambda: Neighbour.end_of("cancelled"))
    assert end["status"] == "canceled"
    assert end["logs"].splitlines()[-1].startswith("E2303 BuildCancelled: ")
    assert processes_of(builder.work_dir) == idle
    assert not list((builder.work_dir.parent / "out").glob(".*"))
    assert "E1300" in predict(builder, config="/nowhere")["error"]


def test_disconnected_client_cancels_its_build(builder: Stack, examples: Path) -> None:
    idle = processes_of(builder.work_dir)
    body = json.dumps({"input": {"config": slow_config(examples, 601)}})

    def started() -> bool:  # Cog frees its slot after it has answered
        nonlocal client
        client.close()
        client = http.client.HTTPConnection("127.0.0.1", builder.port)
        client.request("POST", "/predictions", body, {"Content-Type": "application/json"})
        wait_until(lambda: in_a_step(builder) or select.select([client.sock], [], [], 0)[0])
        return in_a_step(builder)

    client = http.client.HTTPConnection("127.0.0.1", builder.port)
    wait_until(started)
    client.close()
    wait_until(lambda: processes_of(builder.work_dir) == idle)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("modle_id: x\n", "E1300 BuildConfigInvalid: the text: model_id is missing"),
        (
            DEMO.read_text().replace("weights", "wieghts"),
            "E1303 UnknownArgument: build.args.wieghts: 'q8_0': build.py has no --wieghts",
        ),
        (
            DEMO.read_text().replace("example_name: openvino", "example_name: openvin"),
            "E1301 UnknownExample: example_name 'openvin'",
        ),
        (DEMO.read_text().replace("build.py", "biuld.py"), "E1302 UnknownScript"),
        (DEMO.read_text().replace("==0.1.2", "==9"), "E1304 ModelUnavailable: package"),
        (
            DEMO.read_text() + "hf_token: [hf_secret]\n",
            "E1300 BuildConfigInvalid: the text: hf_token: Input should be",
        ),
        ("<!DOCTYPE html>\n<p>Sign in</p>\n", "E1300 BuildConfigInvalid: the text: "),
        pytest.param(
            "data:;base64," + base64.b64encode(os.urandom(4096)).decode(), "E1300", id="random"
        ),
        ("data:,", "E1300 BuildConfigInvalid: the data URL: must be a mapping"),
        ("ftp://127.0.0.1/c.yaml", "E1300 BuildConfigInvalid: config='ftp://127.0.0.1/c.yaml'"),
        ("c.yaml", "E1300 BuildConfigInvalid: config='c.yaml': no such file"),
    ],
)
def test_builds_that_fail_return_an_error_code(builder: Stack, config: str, message: str) -> None:
    answer = predict(builder, config=config)
    assert answer["status"] == "failed"
    assert message in answer["error"]
    assert "Traceback" not in answer["error"]
    assert "hf_secret" not in json.dumps({**answer, "input": None})


def test_missing_config_is_reported_with_its_http_status(builder: Stack, neighbour: str) -> None:
    answer = predict(builder, config=f"{neighbour}/none.yaml?key=secret")
    assert f"E1300 BuildConfigInvalid: config='{neighbour}/none.yaml': HTTP 404" in answer["error"]
    assert "secret" not in answer["error"]


@pytest.mark.parametrize("inputs", [{}, {"config": ""}, {"config": 1}])
def test_invalid_input_returns_422(builder: Stack, inputs: dict[str, Any]) -> None:
    response = httpx.post(f"{builder.url}/predictions", json={"input": inputs})
    assert response.status_code == 422


@pytest.mark.full
@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("cog.server.http", signal.SIGKILL),
        ("cog.server.http", signal.SIGTERM),
        ("_run_worker", signal.SIGKILL),
    ],
)
def test_builds_end_with_cog_and_the_next_one_serves(
    make_builder: Callable[..., Stack], neighbour: str, examples: Path, victim: str, number: int
) -> None:
    builder = make_builder(TRTLLM_DIR=str(examples))
    wait_until(lambda: builder.health() == "READY")
    config = slow_config(examples, 10 if number == signal.SIGTERM else 600)
    begin(builder, neighbour, f"{victim}-{number}", config=config)
    wait_until(lambda: in_a_step(builder))
    os.kill(pid_of(builder, victim), number)
    # Asked to stop, Cog lets a running build end; else nothing waits for anything.
    wait_until(
        lambda: not any("--porcelain" in line for line in processes_of(builder.work_dir).values())
    )
    wait_until(lambda: not in_a_step(builder))
    assert "E1300" in predict(builder, config="/nowhere")["error"]


def test_unwritable_output_directory_fails_setup(
    make_builder: Callable[..., Stack], tmp_path: Path
) -> None:
    builder = make_builder(XDG_CACHE_HOME="/nowhere")
    wait_until(lambda: builder.health() == "READY")
    builder.finish(signal.SIGTERM)
    builder.environment["COG_TRITON_OUTPUT_DIR"] = str(tmp_path / "nowhere")
    builder.start()
    wait_until(lambda: builder.health() == "SETUP_FAILED")
    health = httpx.get(f"{builder.url}/health-check").text
    assert "E1005 InvalidArgument: COG_TRITON_OUTPUT_DIR=" in health
