"""Cog's directory of predictions: left empty, or another user's; work directories; ids."""

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from stack import REPOSITORY, Stack, pid_of, text_of, wait_until

WHY = "only root gives a server its own /tmp, in which the checkout would be missing"
missing = os.geteuid() != 0 or REPOSITORY.is_relative_to("/tmp")
pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.skipif(missing, reason=WHY)]

OWNER = 12345
SAID = f"E2106 TritonStartFailed: /tmp/coglet belongs to the user {OWNER}"
IN_OWN_TMP = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /tmp && exec "$@"']
ASYNC = {"Prefer": "respond-async"}
SHORT, LONG = ({"prompt": "a", "max_tokens": count} for count in (1, 8000))


@pytest.fixture
def tmp() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def mock(tmp: Path, new_stack: Callable[..., Stack]) -> Stack:
    stack = new_stack(COG_TRITON_WORK_DIR=str(tmp / "work"))
    stack.work_dir = tmp / "work"
    stack.command = [*IN_OWN_TMP, str(tmp), *stack.command, "--engine", "mock", "--tps", "200"]
    return stack


def use(stack: Stack, http: httpx.Client, number: int) -> None:
    """A prediction that succeeds, fails, is refused, is left, or is cancelled, soon or later."""
    url, own = f"{stack.url}/predictions", f"{stack.url}/predictions/own-{number}"
    match number % 8:
        case 0:
            answer = http.post(url, json={"input": {"prompt": "a", "seed": 10**30}})
            assert "E1005" in answer.json()["error"]
        case 1:
            assert http.post(url, json={"input": {"max_tokens": "b"}}).status_code == 422
        case 2:  # perhaps before it has begun
            assert http.put(own, json={"input": LONG}, headers=ASYNC).is_success
            assert http.post(f"{own}/cancel").is_success
        case 3 | 4:
            with stack.stream(**LONG) as events:
                name = next(events)[1]["id"]
                if number % 8 == 4:
                    assert http.post(f"{url}/{name}/cancel").is_success
                    assert list(events)[-1][1]["status"] == "canceled"
        case _:
            assert text_of(http.post(url, json={"input": SHORT}).json())


def test_a_thousand_predictions_leave_nothing(mock: Stack, tmp: Path) -> None:
    predictions = tmp / "coglet" / "predictions"
    with mock.served(), httpx.Client(timeout=120) as http, ThreadPoolExecutor(16) as pool:
        with mock.stream(**LONG) as events:
            assert (predictions / next(events)[1]["id"]).is_dir()
        list(pool.map(lambda number: use(mock, http, number), range(1000)))
        wait_until(lambda: not list(predictions.iterdir()))
        assert mock.finish(signal.SIGINT)[0] == 0
        assert not (tmp / "coglet").exists()


def test_killed_processes_leave_nothing(mock: Stack, tmp: Path) -> None:
    predictions = tmp / "coglet" / "predictions"
    with mock.served():
        with mock.stream(**LONG) as events:
            assert (predictions / next(events)[1]["id"]).is_dir()
            os.kill(pid_of(mock, "_run_worker"), signal.SIGKILL)
            assert "E2105" in str(list(events)[-1])
        wait_until(lambda: not list(predictions.iterdir()))


def test_without_cog_the_rest_serves(mock: Stack, tmp: Path) -> None:
    (tmp / "coglet").mkdir()
    os.chown(tmp / "coglet", OWNER, -1)
    mock.start()
    wait_until(lambda: "Ready in" in mock.output)
    asked = {"model": "mock", "prompt": "a", "max_tokens": 3}
    answer = httpx.post(f"{mock.own}/v1/completions", json=asked, timeout=60)
    assert answer.json()["choices"][0]["text"]
    assert httpx.get(f"{mock.triton}/v2/health/ready").status_code == 200
    prediction = httpx.post(f"{mock.url}/predictions", json={"input": SHORT}, timeout=60)
    health = httpx.get(f"{mock.url}/health-check", timeout=60)
    for refused, key in ((prediction, "error"), (health, "user_healthcheck_error")):
        assert (refused.status_code, SAID in refused.json()[key]) == (503, True)
    assert mock.finish(signal.SIGINT)[0] == 0
    mock.command = [*IN_OWN_TMP, str(tmp), sys.executable, "-m", "cog_triton.serve", "--cog-only"]
    mock.start()
    code, output = mock.finish()
    assert (code, SAID in output, "Traceback" in output) == (1, True, False)


def test_any_work_directory_and_any_id(mock: Stack, tmp: Path) -> None:
    name = 'it\'s "a" $(false) `false`; & | < > * ? ~ # \\ \n'.ljust(200, "x")
    (tmp / name).mkdir()
    (tmp / "work").symlink_to(tmp / name, target_is_directory=True)
    mock.work_dir = tmp / name
    with mock.served():
        assert (tmp / name / "run").is_dir()
        for name in ("../../escaped", "/tmp/escaped", "a/b", "..", "", "a" * 201):
            answer = httpx.post(f"{mock.url}/predictions", json={"id": name, "input": SHORT})
            assert (answer.status_code, "E1005" in answer.json()["error"]) == (400, True)
        text = Path(f"/proc/{pid_of(mock, 'cog.server.http')}/environ").read_text()
        environment = dict(item.partition("=")[::2] for item in text.split("\0"))
        check = environment["COG_TRITON_SERVER_ADDRESS"]
        # The server's own predictions: after a slow one, there is a second.
        for name, own in ((check, True), (f"{check}.1", True), (f"{check}1", False)):
            url = f"http://127.0.0.1:{environment['PORT']}/predictions/{name}"
            answer = httpx.put(url, json={"input": SHORT}, timeout=60)
            assert (text_of(answer.json()) == "ready") is own
        assert mock.finish(signal.SIGINT)[0] == 0
