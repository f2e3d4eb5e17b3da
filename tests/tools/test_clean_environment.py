"""Tests see nothing of the environment that they are run in."""

from __future__ import annotations

import os
from pathlib import Path

from clean_environment import CERTIFICATE, HOME, clean

from cog_triton.settings import Settings

GARBAGE = {
    **{name.upper(): "garbage" for name in Settings.model_fields},
    **dict.fromkeys(("XDG_CACHE_HOME", "HF_HOME", "HF_TOKEN", "HF_ENDPOINT"), "garbage"),
    **dict.fromkeys(("COG_LOG_LEVEL", "COG_WEIGHTS", "LANG", "LC_ALL", "HOME"), "garbage"),
    **dict.fromkeys(("TRT_VERSION", "CUDA_VERSION", "TRITON_SERVER_VERSION"), "garbage"),
    **{f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https", "all")},
    **dict.fromkeys(("FORCE_COLOR", "NO_COLOR", "COLUMNS", "HF_HUB_OFFLINE"), "1"),
    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
    "OPENAI_BASE_URL": "http://127.0.0.1:9",
}


def test_only_what_finds_programs_is_kept(tmp_path: Path) -> None:
    environment = {**GARBAGE, "PATH": "/bin", "PYTEST_XDIST_WORKER": "gw0"}
    clean(environment, tmp_path / "home")
    assert environment == {
        "PATH": "/bin",
        "PYTEST_XDIST_WORKER": "gw0",
        "HOME": str(tmp_path / "home"),
        "SSL_CERT_FILE": str(CERTIFICATE),
    }
    assert (tmp_path / "home").is_dir()


def test_the_environment_of_these_tests_is_clean() -> None:
    assert os.environ["HOME"] == str(HOME)
    assert not GARBAGE.keys() & os.environ.keys() - {"HOME"}
