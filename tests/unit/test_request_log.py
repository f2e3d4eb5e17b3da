"""Request log: one line a request, JSON or text, without its content."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cog_triton.backend.triton_log import RequestLine
from cog_triton.engines.request import EngineRequest
from cog_triton.errors import (
    BadMessages,
    CogTritonError,
    InvalidArgument,
    NotFound,
    Overloaded,
    PromptTemplateError,
)
from cog_triton.serving.coglet.predictor import inherited_stderr
from cog_triton.serving.generation import GenerationRequest, GenerationResult
from cog_triton.serving.telemetry.observers import RequestLog
from cog_triton.system import log_format
from cog_triton.text.sampling import SamplingParams

SECRET = "xyzzy"


REQUEST = GenerationRequest(
    engine=EngineRequest(input_ids=[1, 2], sampling=SamplingParams(max_tokens=9)),
    stops=(SECRET,),
    notes=[SECRET],
    id="id-1",
    endpoint="chat",
)


def result(*, cancelled: bool = False) -> GenerationResult:
    return GenerationResult(
        output_token_count=3,
        finish_reason="stop",
        queue_time=0.0,
        time_to_first_token=0.012345,
        duration=0.5,
        cancelled=cancelled,
    )


class Log:
    def __init__(self, path: Path, form: str) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        log_format.configure(form, "info", self._descriptor)
        self.log = RequestLog()

    def line(self) -> str:
        (line,) = self._path.read_text().splitlines()
        assert SECRET not in line
        return line

    def close(self) -> None:
        os.close(self._descriptor)


@pytest.fixture
def logs(tmp_path: Path, own_logging: None) -> Iterator[Any]:
    made: list[Log] = []

    def make(form: str) -> Log:
        made.append(Log(tmp_path / f"{len(made)}.log", form))
        return made[-1]

    yield make
    for log in made:
        log.close()


def test_json_lines_have_all_fields(logs: Any) -> None:
    log = logs("json")
    log.log.ended(REQUEST, result(), None)
    values = json.loads(log.line())
    assert values.pop("timestamp").endswith("Z")
    assert values == {
        "level": "INFO",
        "target": "cog_triton",
        "event": "request",
        "id": "id-1",
        "endpoint": "chat",
        "outcome": "stop",
        "prompt_tokens": 2,
        "output_tokens": 3,
        "queue_s": 0.0,
        "ttft_s": 0.0123,
        "duration_s": 0.5,
    }


def test_console_lines_are_text(logs: Any) -> None:
    log = logs("console")
    log.log.ended(REQUEST, result(), None)
    assert log.line().endswith(
        "Z  INFO cog_triton: request id=id-1 endpoint=chat outcome=stop prompt_tokens=2"
        " output_tokens=3 queue_s=0.0 ttft_s=0.0123 duration_s=0.5"
    )


@pytest.mark.parametrize(
    ("error", "code", "level"),
    [
        (Overloaded(SECRET), "E2107", "ERROR"),
        (InvalidArgument(SECRET), "E1005", "INFO"),
        (KeyError(SECRET), "E2100", "ERROR"),
    ],
)
def test_errors_are_logged_by_code_only(logs: Any, error: Exception, code: str, level: str) -> None:
    log = logs("json")
    log.log.ended(REQUEST, result(), error)
    values = json.loads(log.line())
    assert (values["outcome"], values["code"], values["level"]) == ("error", code, level)


@pytest.mark.parametrize("error", [InvalidArgument(SECRET), Overloaded(SECRET)])
def test_rejected_requests_are_logged(logs: Any, error: CogTritonError) -> None:
    log = logs("json")
    log.log.refused("chat", error)
    values = json.loads(log.line())
    assert (values["event"], values["endpoint"], values["code"]) == ("refused", "chat", error.code)


def test_cancelled_is_not_logged_as_error(logs: Any) -> None:
    log = logs("json")
    log.log.ended(REQUEST, result(cancelled=True), Overloaded(SECRET))
    values = json.loads(log.line())
    assert (values["outcome"], values["level"]) == ("cancelled", "INFO")
    assert "code" not in values


def test_closed_log_does_not_fail_requests(own_logging: None) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    log_format.configure("json", "info", write_end)
    RequestLog().ended(REQUEST, result(), None)
    os.close(write_end)


def test_inherited_stderr_is_found_behind_coglets_pipe(tmp_path: Path) -> None:
    """As coglet does: stderr is a pipe now, and the inherited one has another number."""
    child = (
        "import os; from cog_triton.serving.coglet.predictor import inherited_stderr;"
        "kept = os.dup(2); read, write = os.pipe(); os.dup2(write, 2);"
        "found = inherited_stderr(); assert found == kept, (found, kept);"
        "os.write(found, b'told')"
    )
    parent = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {child!r}]))"
    log = tmp_path / "log"
    with log.open("wb") as file:
        code = subprocess.call([sys.executable, "-c", parent], stderr=file)
    assert (code, log.read_text()) == (0, "told")


def test_inherited_stderr_falls_back_to_stderr() -> None:
    code = (
        "import os; from cog_triton.serving.coglet.predictor import inherited_stderr;"
        "os.close(2); os.pipe(); assert inherited_stderr() == 2"
    )
    assert subprocess.call([sys.executable, "-c", code], stderr=subprocess.PIPE) == 0
    assert inherited_stderr() >= 2


@pytest.mark.parametrize(
    ("error", "field", "reason"),
    [
        (InvalidArgument("max_tokens=-3: must be 1 or more"), "max_tokens", "must be 1 or more"),
        (InvalidArgument(f"stop={SECRET!r}: has 9"), "stop", "has 9"),
        (InvalidArgument(f"a.b[0]: {SECRET!r} is no number"), "a.b[0]", "'...' is no number"),
        (InvalidArgument("a: ['" + SECRET * 9 + "\\' cut"), "a", "['...'"),
        (InvalidArgument(f'a: "{SECRET}" is not of type "string"'), "a", '"..." is not of type "s'),
        (InvalidArgument("temprature: unknown; did you mean 'temperature'?"), "temprature", "unk"),
        (InvalidArgument("the body is not JSON: Expecting ','"), "body", "is not JSON: Exp"),
        (InvalidArgument(f"unknown: {SECRET!r}"), "unknown", "'...'"),
        (BadMessages(f"the model's chat template refuses the messages: {SECRET}"), None, None),
        (PromptTemplateError(f"prompt_template: {SECRET}"), "prompt_template", None),
        (NotFound(f"model={SECRET!r}: not served"), "model", "not served"),
        (NotFound(f"GET '/{SECRET}': no such path"), None, "GET '...': no such path"),
        (NotFound(f"the server's key of '{SECRET}'"), None, "the server's key of '...'"),
        (InvalidArgument("a: " + "b" * 9000), "a", "b" * 200),
        (Overloaded(f"x: {SECRET}"), None, None),
    ],
)
def test_a_refusal_names_field_and_reason_without_values(
    logs: Any, error: CogTritonError, field: str | None, reason: str | None
) -> None:
    log = logs("json")
    log.log.refused("chat", error)
    values = json.loads(log.line())
    assert (values["code"], values.get("field")) == (error.code, field)
    assert values.get("reason", "").startswith(reason or "")
    assert ("reason" in values) is (reason is not None)
    assert len(values.get("reason", "")) <= 200


def test_a_request_of_tritons_has_a_line_of_the_same_shape(logs: Any) -> None:
    log = logs("json")
    line = RequestLine("ensemble", "id-1")
    line.prompt_tokens = 2
    line.arrived(3)
    line.ended("length")
    values = json.loads(log.line())
    assert {*values} == {
        *("timestamp", "level", "target", "event", "id", "endpoint", "model", "outcome"),
        *("prompt_tokens", "output_tokens", "queue_s", "ttft_s", "duration_s"),
    }
    assert (values["endpoint"], values["outcome"], values["output_tokens"]) == (
        *("triton", "length"),
        3,
    )


@pytest.mark.parametrize(
    ("error", "made", "event"),
    [
        (InvalidArgument("max_tokens=0: too few"), 0, "refused"),
        (InvalidArgument("max_tokens=0: too few"), 1, "request"),
        (Overloaded("later"), 0, "request"),
    ],
)
def test_a_request_of_tritons_that_fails_has_its_code(
    logs: Any, error: CogTritonError, made: int, event: str
) -> None:
    log = logs("json")
    line = RequestLine("ensemble", "")
    line.output_tokens = made
    line.ended(error)
    values = json.loads(log.line())
    assert (values["event"], values["code"], "id" in values) == (event, error.code, False)


def test_a_full_log_delays_no_model_of_tritons(own_logging: None) -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with suppress(BlockingIOError):
        while os.write(write_end, b"x" * 4096):
            pass
    os.set_blocking(write_end, True)
    handler = log_format.DescriptorHandler(write_end, "json", waits=False)
    record = logging.LogRecord("cog_triton", logging.INFO, "", 0, "request", (), None)
    handler.emit(record)  # would never return
    taken = os.read(read_end, 1 << 20)
    handler.emit(record)
    assert json.loads(os.read(read_end, 1 << 20))["message"] == "request"
    assert set(taken) == {ord("x")}
    os.close(read_end)
    handler.emit(record)
    os.close(write_end)


def test_a_descriptor_that_was_not_passed_on_is_not_written_to(tmp_path: Path) -> None:
    """Under mpirun its number is another file's, such as a connection to the engine."""
    log, other = (os.open(tmp_path / name, os.O_CREAT | os.O_RDWR) for name in ("log", "other"))
    told = log_format.name(log)
    assert log_format.inherited(told) == log
    os.dup2(other, log)
    assert log_format.inherited(told) is None
    os.close(log)
    assert log_format.inherited(told) is None
    os.close(other)
