"""Secrets and control characters: kept from processes, from logs and from terminals."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console
from typer import Exit

from cog_triton.engines.registry import FAMILIES
from cog_triton.errors import EngineCorrupt
from cog_triton.settings import Settings
from cog_triton.system import terminal
from cog_triton.system.log_format import ConsoleFormatter
from cog_triton.system.printable import printable
from cog_triton.system.redaction import (
    HUB_TOKENS,
    is_secret,
    redact_address,
    redact_url,
    without_secrets,
)


def test_user_password_query_and_fragment_are_redacted() -> None:
    assert redact_url("https://u:p@host:8443/a/b.tar?key=1#x") == "https://host:8443/a/b.tar"
    assert redact_url("http://[::1]:80/") == "http://[::1]:80/"
    with pytest.raises(ValueError, match="IPv6"):
        redact_url("http://[::1/")


@pytest.mark.parametrize("scheme", ["s3", "ftp", "file", "https", "gs", "S3"])
def test_addresses_are_redacted_in_every_scheme(scheme: str) -> None:
    address = f"{scheme}://KEY:SECRET@bucket/x.tar?X-Amz-Signature=SECRET#SECRET"
    assert redact_address(address).lower() == f"{scheme.lower()}://bucket/x.tar"


@pytest.mark.parametrize(
    "address",
    [
        "s3://KEY:SEC/RET@bucket/x.tar",
        "s3://KEY:SEC#RET@bucket/x.tar",
        "s3://KEY:12/RET@bucket/x.tar",
        "s3://KEY:SEC]RET@bucket/x.tar",
    ],
)
def test_of_a_url_that_cannot_be_taken_apart_the_scheme_is_left(address: str) -> None:
    assert redact_address(address) == "s3://..."


def test_paths_are_shown_unchanged() -> None:
    assert redact_address("models/a@b?c") == "models/a@b?c"


def test_control_characters_are_escaped_and_text_is_not() -> None:
    assert printable("größe 日本 a/b.txt") == "größe 日本 a/b.txt"
    assert printable("a\n\x1b[1m\x9b\u202e\ud800") == "a\\n\\x1b[1m\\x9b\\u202e\\ud800"
    assert printable("a\n\tb\r", keep="\n\t") == "a\n\tb\\r"


def test_errors_and_console_logs_cannot_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.StringIO()
    monkeypatch.setattr(terminal, "err", Console(file=written, soft_wrap=True))
    with pytest.raises(Exit), terminal.coded_errors():
        raise EngineCorrupt("x\x1b[2J: broken\nits log")
    assert written.getvalue() == "error: E1306 EngineCorrupt: x\\x1b[2J: broken\nits log\n"
    record = logging.LogRecord("n", logging.INFO, "p", 1, "Unpacking \x1b]0;t\x07", (), None)
    assert "\x1b" not in ConsoleFormatter().format(record)


SECRETS = (
    *("OPENAI_API_KEY", "COG_TRITON_API_KEY", "WEBHOOK_AUTH_TOKEN", "HF_TOKEN", "COG_WEIGHTS"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "NGC_API_KEY"),
    *("AZURE_CLIENT_SECRET", "AZURE_STORAGE_KEY", "AZURE_STORAGE_CONNECTION_STRING"),
    *("GOOGLE_APPLICATION_CREDENTIALS", "REPLICATE_API_TOKEN", "WANDB_API_KEY"),
)


def test_other_variables_stay() -> None:
    kept = {
        *("PATH", "LD_LIBRARY_PATH", "HF_HOME", "TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES"),
        *("NCCL_DEBUG", "SSH_AUTH_SOCK", "OMPI_MCA_orte_tmpdir_base", "LOG_LEVEL", "HTTPS_PROXY"),
    }
    assert set(without_secrets(dict.fromkeys([*kept, *SECRETS], "x"))) == kept
    public = {name.upper() for name in Settings.model_fields if is_secret(name.upper())}
    assert public <= {"OPENAI_API_KEY", "COG_TRITON_API_KEY", "COG_WEIGHTS"}


def test_only_families_that_download_weights_themselves_get_the_hubs_tokens() -> None:
    assert {family.name: family.secrets for family in FAMILIES if family.secrets} == {
        "vllm": HUB_TOKENS,
    }
