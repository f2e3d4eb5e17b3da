"""Every environment variable, typed, in one place."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SecretStr, ValidationError
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

from cog_triton.errors import InvalidArgument

IMAGE_ENGINE_DIR = Path("/src/triton_model_repo/tensorrt_llm/1")


def _blank_is_unset(value: object) -> object:
    return None if value == "" else value


OptionalInt = Annotated[int | None, BeforeValidator(_blank_is_unset)]
OptionalFloat = Annotated[
    float | None, Field(allow_inf_nan=False), BeforeValidator(_blank_is_unset)
]
OptionalBool = Annotated[bool | None, BeforeValidator(_blank_is_unset)]
OptionalPath = Annotated[Path | None, BeforeValidator(_blank_is_unset)]
EngineDir = Annotated[Path, BeforeValidator(lambda value: value or IMAGE_ENGINE_DIR)]
Port = Annotated[int, Field(ge=1, le=65535)]
OptionalPort = Annotated[
    int | None,
    Field(ge=1, le=65535),
    BeforeValidator(lambda value: None if value in ("", "0", 0) else value),
]
OptionalText = Annotated[str | None, BeforeValidator(_blank_is_unset)]


def _engine_by_name(value: object) -> object:
    """The engines that need no directory, by which others are known."""
    if value in (None, "", "mock"):
        return value or None
    raise PydanticCustomError(
        "engine",
        "must be mock; another engine is known by its directory, so name that or its engine.tar",
    )


EngineName = Annotated[str | None, BeforeValidator(_engine_by_name)]
_MOCK = "mock_"


class Settings(BaseSettings):
    """Read from the environment; field names are the variables' names in lower case."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore")

    engine_dir: EngineDir = Field(IMAGE_ENGINE_DIR, description="engine directory to serve")
    cog_weights: str | None = Field(None, description="engine.tar to unpack and serve")
    cog_triton_config: OptionalPath = Field(None, description="serve config, YAML")
    cog_triton_sm: str | None = Field(None, description="GPU architecture an image is for")
    cog_triton_skip_preflight: bool = Field(
        False, description="serve an engine that does not seem to fit this machine"
    )
    cog_triton_work_dir: OptionalPath = Field(None, description="where run-time files are kept")
    cog_triton_step_python: OptionalPath = Field(
        None, description="Python that build steps run in, with packages of its own"
    )
    trtllm_dir: OptionalPath = Field(
        None, description="directory of TensorRT-LLM's sources, which holds its examples"
    )
    cog_triton_output_dir: OptionalPath = Field(None, description="where the builder writes")

    cog_triton_engine: EngineName = Field(None, description="engine without a directory: mock")
    mock_tps: OptionalFloat = Field(None, ge=0, description="mock: tokens per second, 0 flat out")
    mock_jitter: OptionalFloat = Field(
        None, ge=0, le=1, description="mock: how far tokens stray, as a part of their distance"
    )
    mock_prefill_ms: OptionalFloat = Field(
        None, ge=0, description="mock: milliseconds for each input token"
    )
    mock_tokens_per_response: OptionalInt = Field(
        None, ge=1, description="mock: tokens that leave together"
    )
    mock_join: OptionalBool = Field(
        None, description="mock: whether tokens that are late leave as one response"
    )
    mock_max_batch_size: OptionalInt = Field(None, ge=1, description="mock: streams at once")

    system_prompt: str | None = Field(None, description="default system prompt")
    prompt_template: str | None = Field(None, description="default prompt template")
    stop_sequences: str | None = Field(None, description="default stop sequences, by comma")
    end_id: OptionalInt = Field(None, ge=-1, description="end-of-sequence token id")
    pad_id: OptionalInt = Field(None, ge=-1, description="padding token id")
    max_sequence_length: OptionalInt = Field(None, ge=1, description="prompt and output, tokens")
    log_performance_metrics: bool = Field(False, description="log metrics of every prediction")

    port: Port = Field(5000, description="where Cog listens")
    cog_triton_drain_file: OptionalPath = Field(None, description="tells the worker to drain")
    cog_max_concurrency: int = Field(1, ge=1, description="predictions Cog takes at once")
    max_concurrency: OptionalInt = Field(None, ge=1, description="predictions in the engine")
    max_queue: OptionalInt = Field(None, ge=0, description="predictions that may wait")
    drain_timeout: float = Field(25, ge=0, description="seconds to end in, once told to stop")
    cog_host: str = Field("127.0.0.1", description="address Cog and our own HTTP server bind")
    openai_port: OptionalPort = Field(None, description="port of the OpenAI API; unset is off")
    openai_api_key: Annotated[SecretStr | None, BeforeValidator(_blank_is_unset)] = Field(
        None, description="key that requests of the OpenAI API must bring"
    )
    served_model_name: OptionalText = Field(None, description="name of the model in the OpenAI API")
    max_request_bytes: int = Field(8 << 20, ge=1, description="longest body of a request, bytes")
    log_format: Annotated[
        Literal["json", "console"], BeforeValidator(lambda value: value or "json")
    ] = Field("json", description="of the log, Cog's as well")
    log_requests: bool = Field(True, description="log a line for each request")
    metrics_port: OptionalPort = Field(None, description="port of /metrics and /health alone")

    world_size: OptionalInt = Field(None, ge=1, description="ranks of the engine, a GPU for each")
    cog_triton_rank: OptionalInt = Field(None, ge=0, description="the only rank to start here")
    mpirun: OptionalPath = Field(None, description="mpirun of Open MPI")
    mpirun_args: str = Field("", description="more options for mpirun")
    mpi_hosts: str | None = Field(None, description="machines of the ranks, by comma")
    trtllm_orchestrator: bool = Field(False, description="orchestrator mode of TensorRT-LLM")
    trtllm_orchestrator_spawn_processes: bool = Field(
        True, description="whether an orchestrator starts the ranks itself"
    )
    triton_host: str = Field("127.0.0.1", description="address Triton binds")
    triton_http_port: Port = 8000
    triton_grpc_port: Port = 8001
    triton_metrics_port: Port = 8002
    triton_timeout: float = Field(120, gt=0, description="seconds without a byte from Triton")
    triton_start_timeout: float = Field(300, gt=0, description="seconds until Triton is ready")
    triton_probe_period: float = Field(1, gt=0, description="seconds between probes of Triton")
    triton_probe_timeout: float = Field(3, gt=0, description="seconds a probe's answer may take")
    triton_max_restarts: int = Field(5, ge=0, description="restarts in a row before giving up")
    tritonserver: OptionalPath = Field(None, description="path of the tritonserver binary")

    @property
    def work_dir(self) -> Path:
        """Where unpacked engines and run-time files go: COG_TRITON_WORK_DIR, else the cache."""
        if self.cog_triton_work_dir:
            return self.cog_triton_work_dir
        cache = os.environ.get("XDG_CACHE_HOME") or os.environ.get("HOME", "") + "/.cache"
        home = Path(cache)
        usable = home if os.access(home.parent, os.W_OK) else Path(tempfile.gettempdir())
        return usable / "cog-triton"

    @property
    def mock_options(self) -> dict[str, float]:
        """The MOCK_* settings that are set, by the names of the mock's own options."""
        return {
            name.removeprefix(_MOCK): value
            for name in type(self).model_fields
            if name.startswith(_MOCK) and (value := getattr(self, name)) is not None
        }

    @property
    def mpi_host_names(self) -> list[str]:
        """MPI_HOSTS, one by one."""
        return [host.strip() for host in (self.mpi_hosts or "").split(",") if host.strip()]

    @property
    def http_ports(self) -> dict[str, tuple[str, int]]:
        """Where our own HTTP server listens, as `triton_ports`; what is off is left out."""
        ports = {"OPENAI_PORT": self.openai_port, "METRICS_PORT": self.metrics_port}
        return {name: (self.cog_host, port) for name, port in ports.items() if port is not None}

    @property
    def triton_ports(self) -> dict[str, tuple[str, int]]:
        """Address and port of each of Triton's endpoints, by the name of its setting."""
        return {
            "TRITON_HTTP_PORT": (self.triton_host, self.triton_http_port),
            "TRITON_GRPC_PORT": (self.triton_host, self.triton_grpc_port),
            "TRITON_METRICS_PORT": (self.triton_host, self.triton_metrics_port),
        }

    @property
    def triton_url(self) -> str:
        """Where the serving process reaches Triton, which may bind every address."""
        return f"http://{url_host(self.triton_host)}:{self.triton_http_port}"


def load_settings(**overrides: object) -> Settings:
    """Settings from the environment; raises E1005 naming the variable, value and rule."""
    try:
        return Settings(**overrides)  # type: ignore[arg-type]
    except ValidationError as error:
        problems = [
            f"{str(item['loc'][0]).upper()}={item['input']!r}: {item['msg']}"
            for item in error.errors()
        ]
        raise InvalidArgument("; ".join(problems)) from error


def url_host(host: str) -> str:
    """How a URL names `host`, an address that a server on this machine binds."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
