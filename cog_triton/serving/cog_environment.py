"""Environment of Cog's process: the settings of everything below it, as absolute paths."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cog_triton.settings import Settings


def engine_environment(settings: Settings) -> dict[str, str]:
    """What of the environment says which engine is served; blank unsets what another one had."""
    weights = settings.cog_weights or ""
    python = settings.cog_triton_vllm_python
    return {
        "ENGINE_DIR": str(settings.engine_dir.resolve()),
        "COG_WEIGHTS": weights if "://" in weights or not weights else str(Path(weights).resolve()),
        "COG_TRITON_ENGINE": settings.cog_triton_engine or "",
        # Not resolved: an environment's Python is a link.
        "COG_TRITON_VLLM_PYTHON": str(python.absolute()) if python else "",
        "SERVED_MODEL_NAME": settings.served_model_name or "",
        **{name.upper(): "" for name in type(settings).model_fields if name.startswith("mock_")},
        **{f"MOCK_{name.upper()}": str(v) for name, v in settings.mock_options.items()},
    }


def cog_environment(
    settings: Settings,
    host: str,
    port: int,
    max_concurrency: int,
    *,
    verbose: bool,
) -> dict[str, str]:
    """The complete environment of a Cog that listens on `host` and `port`.

    Paths are absolute, since Cog runs in the directory of its project. `verbose` leaves Cog's own
    log on.
    """
    environment = {
        **os.environ,
        # coglet starts its worker as `python` of PATH, not as this interpreter.
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
        "COG_HOST": host,
        "PORT": str(port),
        "OPENAI_PORT": str(settings.openai_port or ""),
        "METRICS_PORT": str(settings.metrics_port or ""),
        "COG_PREDICT_TYPE_STUB": "predict.py:Predictor",
        "COG_MAX_CONCURRENCY": str(max_concurrency),
        # coglet answers 409, with slots free, when two of its threads look for one at once.
        "TOKIO_WORKER_THREADS": "1",
        "TRITON_HOST": settings.triton_host,
        "TRITON_HTTP_PORT": str(settings.triton_http_port),
        "TRITON_GRPC_PORT": str(settings.triton_grpc_port),
        "TRITON_METRICS_PORT": str(settings.triton_metrics_port),
        "COG_TRITON_WORK_DIR": str(settings.work_dir.resolve()),
        **engine_environment(settings),
    }
    if settings.cog_triton_config:
        environment["COG_TRITON_CONFIG"] = str(settings.cog_triton_config.resolve())
    if settings.lora_dir:
        environment["LORA_DIR"] = str(settings.lora_dir.resolve())
    if settings.world_size:
        environment["WORLD_SIZE"] = str(settings.world_size)
    if settings.tritonserver:
        environment["TRITONSERVER"] = str(settings.tritonserver.resolve())
    if not verbose:
        environment.setdefault("COG_LOG_LEVEL", "error")
        environment.setdefault("LOG_FORMAT", "console")
    if not sys.stdout.isatty():
        environment.setdefault("NO_COLOR", "1")
    return environment
