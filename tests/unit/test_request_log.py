"""Request log: one line a request, JSON or text, without its content."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cog_triton.engines.request import EngineRequest
from cog_triton.errors import (
    BadMessages,
    CogTritonError,
    InvalidArgument,
    NotFound,
    Overloaded,
    PromptTemplateError,
)
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


RESULT = GenerationResult(
    output_token_count=3,
    finish_reason="stop",
    queue_time=0.0,
    time_to_first_token=0.012345,
    duration=0.5,
)


@pytest.fixture
def logged(tmp_path: Path, own_logging: None) -> Iterator[Callable[[], dict[str, Any]]]:
    """Reads the only line of the log, which has no content of requests."""
    path = tmp_path / "log"

    def line() -> dict[str, Any]:
        (text,) = path.read_text().splitlines()
        assert SECRET not in text
        return dict(json.loads(text))

    with path.open("wb", buffering=0) as file:
        log_format.configure("json", "info", file.fileno())
        yield line


def test_json_lines_have_all_fields(logged: Any) -> None:
    RequestLog().ended(REQUEST, RESULT, None)
    values = logged()
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
    logged: Any, error: CogTritonError, field: str | None, reason: str | None
) -> None:
    RequestLog().refused("chat", error)
    values = logged()
    assert (values["code"], values.get("field")) == (error.code, field)
    assert values.get("reason", "").startswith(reason or "")
    assert ("reason" in values) is (reason is not None)
    assert len(values.get("reason", "")) <= 200


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
