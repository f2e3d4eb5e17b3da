"""`cog-triton serve` before it starts Cog: ports, environment, and the message when it is ready."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cog_triton.errors import InvalidArgument
from cog_triton.serving.cog_health import still_starting
from cog_triton.serving.cog_process import CogServer, cog_environment, ready_message
from cog_triton.settings import load_settings
from cog_triton.system.ports import free_ports


def server(host: str = "127.0.0.1", port: int | None = None, **settings: Any) -> CogServer:
    ports = free_ports(4)
    names = ("triton_http_port", "triton_grpc_port", "triton_metrics_port")
    triton_ports = dict(zip(names, ports[1:], strict=True))
    return CogServer(
        load_settings(**{**triton_ports, **settings}), host, port or ports[0], 16, verbose=False
    )


@contextmanager
def listening(host: str = "127.0.0.1") -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind((host, 0))
        sock.listen()
        yield sock.getsockname()[1]


def start_error(cog: CogServer) -> str:
    lines: list[str] = []
    with pytest.raises(InvalidArgument) as caught:
        cog.run(lines.append)
    assert lines == []
    return caught.value.detail


@pytest.mark.parametrize(
    "name",
    [
        *("TRITON_HTTP_PORT", "TRITON_GRPC_PORT", "TRITON_METRICS_PORT"),
        *("OPENAI_PORT", "METRICS_PORT", "PORT"),
    ],
)
def test_a_port_in_use_fails_the_start_by_name(name: str) -> None:
    with listening() as port:
        error = start_error(server(**{name.lower(): port}))
    assert error.startswith(f"{name}={port}: cannot listen on 127.0.0.1:{port}")
    assert "in use" in error


def test_waiting_is_told_with_its_limit_and_what_for() -> None:
    line = still_starting(load_settings(triton_start_timeout=1800), 30.4)
    assert line.startswith("still starting after 30 s: the engine is unpacked and loaded")
    assert line.endswith("Triton has 1800 s (TRITON_START_TIMEOUT)")


def test_a_port_in_use_on_one_address_is_in_use_for_all_addresses() -> None:
    with listening() as port:
        assert start_error(server("0.0.0.0", port)).startswith(f"PORT={port}: ")


def test_two_settings_with_the_same_port_are_rejected() -> None:
    (port,) = free_ports(1)
    error = start_error(server(port=port, triton_grpc_port=port))
    assert f"TRITON_GRPC_PORT={port}" in error
    assert "PORT too" in error


def test_an_address_of_another_machine_is_rejected() -> None:
    error = start_error(server("203.0.113.7"))
    assert error.startswith("PORT=")
    assert "203.0.113.7" in error


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"OPENAI_PORT": "8080"}, True),
        ({"OPENAI_PORT": "8080", "OPENAI_PAGE": "0"}, False),
        ({}, False),
    ],
)
def test_the_ready_message_names_the_page_if_there_is_one(
    environment: dict[str, str], shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    message = ready_message(load_settings(), "127.0.0.1", 5000, 1.234)
    assert ("http://localhost:8080/ in a browser" in message) is shown


def test_the_ready_message_names_grpc_only_where_it_is_on(tmp_path: Path) -> None:
    message = ready_message(load_settings(), "127.0.0.1", 5000, 1.234)
    assert "Triton on 8000, 8001, 8002)" in message
    message = ready_message(load_settings(cog_triton_keys=tmp_path), "127.0.0.1", 5000, 1.234)
    assert "Triton on 8000, 8002)" in message


@pytest.mark.parametrize(("host", "url"), [("::1", "http://[::1]:5000/"), ("127.0.0.1", ":5000/")])
def test_the_ready_message_has_a_request_to_try(host: str, url: str) -> None:
    message = ready_message(load_settings(), host, 5000, 1.234)
    assert message.startswith("Ready in 1.2 s")
    assert f"{url}predictions" in message
    _, _, body = message.rpartition(" -d ")
    assert json.loads(body.strip("'"))["input"]["prompt"]


def environment(*, verbose: bool = False, **settings: Any) -> dict[str, str]:
    return cog_environment(load_settings(**settings), "127.0.0.2", 5001, 16, verbose=verbose)


def test_settings_are_passed_on_as_variables() -> None:
    found = environment(
        openai_port=8123,
        triton_http_port=8124,
        cog_triton_engine="mock",
        mock_tps=100,
        mock_max_batch_size=8,
        mock_join=False,
        mock_answers="/a/script.json",
        cog_triton_vllm_python="/env/bin/python",
        served_model_name="org/name",
    )
    assert (
        found.items()
        >= {
            "COG_HOST": "127.0.0.2",
            "PORT": "5001",
            "COG_MAX_CONCURRENCY": "16",
            "OPENAI_PORT": "8123",
            "METRICS_PORT": "",
            "TRITON_HOST": "127.0.0.1",
            "TRITON_HTTP_PORT": "8124",
            "COG_TRITON_ENGINE": "mock",
            "MOCK_TPS": "100.0",
            "MOCK_MAX_BATCH_SIZE": "8",
            "MOCK_ANSWERS": "/a/script.json",
            "COG_TRITON_VLLM_PYTHON": "/env/bin/python",
            "SERVED_MODEL_NAME": "org/name",
        }.items()
    )
    assert load_settings(mock_join=found["MOCK_JOIN"]).mock_join is False


def test_paths_are_absolute_since_cog_runs_in_its_projects_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = (
        "ENGINE_DIR",
        "COG_WEIGHTS",
        "COG_TRITON_CONFIG",
        "COG_TRITON_WORK_DIR",
        "TRITONSERVER",
        "COG_TRITON_KEYS",
        "TLS_CERT_FILE",
        "TLS_KEY_FILE",
        "CHAT_TEMPLATE",
        "LORA_DIR",
        "MPIRUN",
    )
    found = environment(**{name.lower(): f"below/{name}" for name in names})
    assert found.items() >= {name: str(tmp_path / "below" / name) for name in names}.items()
    assert "MPIRUN" not in environment(mpirun="mpirun.openmpi")
    for url in ("https://host/engine.tar?a=b", "file:///engines/a.tar"):
        assert environment(cog_weights=url)["COG_WEIGHTS"] == url


def test_cogs_log_level_is_error_unless_set_or_verbose(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment()["COG_LOG_LEVEL"] == "error"
    assert "COG_LOG_LEVEL" not in environment(verbose=True)
    monkeypatch.setenv("COG_LOG_LEVEL", "debug")
    assert environment()["COG_LOG_LEVEL"] == "debug"
