"""Secrets of the environment: recognised by name, handed to no process that has no use for them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from local_parent import linked
from test_triton_server import executable

from cog_triton.engines.registry import FAMILIES
from cog_triton.errors import TritonStartFailed
from cog_triton.settings import Settings, load_settings
from cog_triton.system.redaction import HUB_TOKENS, is_secret, without_secrets
from cog_triton.triton.server import TritonServer

SECRETS = (
    *("OPENAI_API_KEY", "COG_TRITON_API_KEY", "WEBHOOK_AUTH_TOKEN", "HF_TOKEN", "COG_WEIGHTS"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "NGC_API_KEY"),
    *("AZURE_CLIENT_SECRET", "AZURE_STORAGE_KEY", "AZURE_STORAGE_CONNECTION_STRING"),
    *("GOOGLE_APPLICATION_CREDENTIALS", "REPLICATE_API_TOKEN", "WANDB_API_KEY"),
)


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_are_known_by_name(name: str) -> None:
    assert is_secret(name)


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


@pytest.mark.parametrize("kept", [frozenset(), HUB_TOKENS])
def test_triton_gets_no_secret_but_those_that_its_engine_needs(
    kept: frozenset[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "x")
    code = "import json, os, sys; json.dump(dict(os.environ), sys.stdout)"
    binary = executable(
        tmp_path / "triton" / "bin" / "tritonserver", f"python3 -c '{code}' > env; exit 1"
    )
    settings = load_settings(tritonserver=binary)

    async def ready() -> bool:
        return False

    async def main() -> None:
        async with linked(tmp_path) as parent:
            server = TritonServer(settings, tmp_path / "repo", parent, secrets=kept)
            with pytest.raises(TritonStartFailed):
                await server.start(ready, asyncio.Event().wait)

    asyncio.run(main())
    found = json.loads((binary.parent / "env").read_text())
    assert found["PATH"]
    assert set(found) & set(SECRETS) == kept & set(SECRETS)
