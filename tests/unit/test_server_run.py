"""`cog-triton serve`: ports, the server's environment, and the message when it is ready."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from cog_triton.cli.server_run import ready_message, server_environment
from cog_triton.errors import InvalidArgument
from cog_triton.settings import load_settings
from cog_triton.system.ports import free_ports, require_free


def refusal(**settings: Any) -> str:
    names = ("port", "triton_http_port", "triton_grpc_port", "triton_metrics_port")
    ports = dict(zip(names, free_ports(4), strict=True))
    found = load_settings(**{**ports, **settings})
    with pytest.raises(InvalidArgument) as caught:
        require_free({**found.public_ports, **found.triton_ports})
    return caught.value.detail


def test_a_port_in_use_on_one_address_is_in_use_for_all_addresses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert refusal(cog_host="0.0.0.0", port=taken.getsockname()[1]).startswith("PORT=")


def test_two_settings_with_the_same_port_are_rejected() -> None:
    (port,) = free_ports(1)
    error = refusal(port=port, triton_grpc_port=port)
    assert (f"TRITON_GRPC_PORT={port}" in error, "PORT too" in error) == (True, True)


def test_an_address_of_another_machine_is_rejected() -> None:
    assert "203.0.113.7" in refusal(cog_host="203.0.113.7")


@pytest.mark.parametrize("page", ["1", "0"])
def test_the_ready_message_names_the_page_if_there_is_one(page: str) -> None:
    message = ready_message(load_settings(openai_port=8080, openai_page=page), 1.234)
    assert message.startswith("Ready in 1.2 s")
    assert ("http://localhost:8080/ in a browser" in message) is (page == "1")


def test_the_ready_message_names_grpc_only_if_it_is_on(tmp_path: Path) -> None:
    message = ready_message(load_settings(), 1.234)
    assert "Triton on 8000, 8001, 8002)" in message
    message = ready_message(load_settings(cog_triton_keys=tmp_path), 1.234)
    assert "Triton on 8000, 8002)" in message


def environment(*, verbose: bool = False, **settings: Any) -> dict[str, str]:
    return server_environment(load_settings(**settings), 16, verbose=verbose)


def test_settings_are_passed_on_as_variables() -> None:
    given = {"COG_HOST": "127.0.0.2", "PORT": "5001", "OPENAI_PORT": "8123", "MOCK_TPS": "100.0"}
    given |= {"MOCK_MAX_BATCH_SIZE": "8", "MOCK_ANSWERS": "/a/b.json", "COG_TRITON_ENGINE": "mock"}
    found = environment(mock_join=False, **{name.lower(): given[name] for name in given})
    assert found.items() >= {**given, "COG_MAX_CONCURRENCY": "16", "METRICS_PORT": ""}.items()
    assert load_settings(mock_join=found["MOCK_JOIN"]).mock_join is False


PATHS = "ENGINE_DIR COG_WEIGHTS COG_TRITON_CONFIG COG_TRITON_WORK_DIR TRITONSERVER COG_TRITON_KEYS"
PATHS += " TLS_CERT_FILE TLS_KEY_FILE CHAT_TEMPLATE LORA_DIR MPIRUN"


def test_paths_are_absolute_since_cog_runs_in_its_projects_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = PATHS.split()
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
