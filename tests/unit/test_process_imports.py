"""What each process of a server imports: packages that it has no use for delay every start.

Six stubs, an engine process, the front door, Cog's worker and the command line start together, so
what one of them imports in vain is paid for up to seven times.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

STUBS = (
    "backend.text_processing",
    "backend.bls",
    "backend.token_model",
    "backend.step_model",
    "backend.adapter_loader",
    "backend.vllm_text_model",
)
ENGINES = ("backend.engine_process", "engines.mock.engine")
SETTINGS = ("pydantic", "pydantic_settings", "asyncio", "yaml")
CLIENTS = ("httpx", "requests", "grpc", "huggingface_hub")
PROCESSES = {
    "stub": (STUBS, (*SETTINGS, *CLIENTS)),
    "engine process": (ENGINES, (*SETTINGS, *CLIENTS)),
    "front door": (("door.__main__",), (*CLIENTS, "numpy", "tokenizers")),
    "Cog server": (("serving.coglet.http_server",), (*SETTINGS, *CLIENTS, "numpy", "tokenizers")),
    "command line": (
        ("cli.serve", "serving.cog_process", "models.preparation"),
        (*CLIENTS, "numpy", "tokenizers"),
    ),
}
SCRIPT = """
import importlib, sys, types
# In a stub, Triton provides it.
provided = types.ModuleType("triton_python_backend_utils")
provided.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
sys.modules[provided.__name__] = provided
for name in sys.argv[1].split():
    importlib.import_module(f"cog_triton.{name}")
print(*sys.modules)
"""


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_imports_no_package_that_it_has_no_use_for(process: str) -> None:
    modules, needless = PROCESSES[process]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, " ".join(modules)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {*needless} & {*done.stdout.split()}
