"""Settings: every environment variable that the package reads, typed, in one place."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from cog_triton.environment_types import (
    IMAGE_ENGINE_DIR,
    EngineDir,
    EngineName,
    LogLevel,
    OptionalBool,
    OptionalFloat,
    OptionalInt,
    OptionalPath,
    OptionalPort,
    OptionalSecret,
    OptionalText,
    Port,
    ReasoningParser,
    ToolCallParser,
)
from cog_triton.errors import InvalidArgument

_MOCK = "mock_"
_LOOPBACK = "127.0.0.1"
_OFF = ("", "0", "false", "f", "no", "n", "off", _LOOPBACK)
_LOCAL_GRPC = (
    "is gone, as neither key nor limits held for it: gRPC is on 127.0.0.1 alone. Unset it; let"
    " clients use Triton's HTTP port, or pass the gRPC port on yourself (ssh -L, your own proxy)"
)
PARKING_GONE = (
    "is gone: no engine outlives its server. SPARE_ENGINE=1 has a second engine take over, and"
    " `cog-triton roll` starts another server before the old one ends (parking.md)"
)
_REMOVED = {
    **dict.fromkeys(("TRITON_GRPC_PUBLIC", "TRITON_GRPC_HOST"), _LOCAL_GRPC),
    "PARK_ENGINE": PARKING_GONE,
}


class Settings(BaseSettings):
    """Settings from the environment; field names are the variables' names in lower case."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore")

    engine_dir: EngineDir = Field(
        IMAGE_ENGINE_DIR, description="Engine directory to serve, without `COG_WEIGHTS`."
    )
    cog_weights: str | None = Field(
        None,
        description="engine.tar to unpack and serve (also .tar.gz, .tar.zst, or a directory): a"
        " path, a URL (`file`, `http(s)`, `s3`, `gs`, `az`), whose download goes on after a"
        " restart, or an engine in a registry, `oci://REF` (oci.md).",
    )
    cog_triton_plain_http: OptionalText = Field(
        None,
        description="Registries, with commas between, that `oci://` reaches by HTTP, without TLS:"
        " `registry.lan:5000`. This machine's own are always (oci.md).",
    )
    cog_triton_config: OptionalPath = Field(
        None,
        description="Serve config, YAML: arguments of the Triton models (serve-config.md). Unset:"
        " `config.yaml` in the working directory, if that has the key `instantiate`.",
    )
    cog_triton_sm: str | None = Field(
        None,
        description="GPU architectures that an image is for, as `86` or `80,86`; another GPU is"
        " refused (E1305). Set in images.",
    )
    cog_triton_skip_preflight: bool = Field(
        False, description="Serve an engine that does not fit this machine, with a warning."
    )
    cog_triton_vllm_untested: bool = Field(
        False,
        description="Serve with a version of vLLM that this cog-triton was never run with (E1305"
        " otherwise), with a warning at every start (vllm.md).",
    )
    cog_triton_vllm_python: OptionalPath = Field(
        None,
        description="Python that has vLLM, if it is not Triton's own; `engine_python` of a serve"
        " config goes before it. `cog-triton serve` sets it to what `cog-triton setup vllm` made.",
    )
    lora_dir: OptionalPath = Field(
        None,
        description="Directory below which LoRA adapters may be loaded at run time, which also"
        " needs `COG_TRITON_API_KEY` (lora.md).",
    )
    max_lora_bytes: int = Field(
        4 << 30, ge=1, description="Largest LoRA adapter, in bytes; E1304 beyond."
    )
    max_loras_loaded: int = Field(
        256, ge=1, description="LoRA adapters that may be loaded at a time; E2107 beyond."
    )
    cog_triton_work_dir: OptionalPath = Field(
        None,
        description="Where unpacked engines, Triton's log and the builder's steps are kept. Unset:"
        " `$XDG_CACHE_HOME/cog-triton`, else `~/.cache/cog-triton`.",
    )
    cog_triton_step_python: OptionalPath = Field(
        None, description="Python that build steps run in, with packages of its own."
    )
    trtllm_dir: OptionalPath = Field(
        None, description="Directory of TensorRT-LLM's sources, whose `examples` steps run."
    )
    cog_triton_output_dir: OptionalPath = Field(
        None,
        description="Where the builder's predictor writes engine.tar. Unset: the working"
        " directory.",
    )

    cog_triton_engine: EngineName = Field(
        None, description="`mock` serves the mock engine, which needs no directory."
    )
    mock_tps: OptionalFloat = Field(
        None, ge=0, description="Tokens per second of a stream; 0 is flat out. Unset: 44."
    )
    mock_step_ms: OptionalFloat = Field(
        None,
        ge=0,
        description="Milliseconds of a step, in which every stream makes a token, as in an"
        " engine's batch; 0 gives each stream a clock of its own. Unset: 0.",
    )
    mock_jitter: OptionalFloat = Field(
        None,
        ge=0,
        le=1,
        description="How far a token strays from its time, as a part of the time between two"
        " tokens. Unset: 0.",
    )
    mock_prefill_ms: OptionalFloat = Field(
        None, ge=0, description="Milliseconds for each input token. Unset: 0."
    )
    mock_tokens_per_response: OptionalInt = Field(
        None, ge=1, description="Tokens of one response. Unset: 1."
    )
    mock_join: OptionalBool = Field(
        None, description="Whether tokens that are late share one response. Unset: true."
    )
    mock_max_batch_size: OptionalInt = Field(
        None, ge=1, description="Streams at once; more wait. Unset: 256."
    )

    system_prompt: str | None = Field(
        None,
        description="Default of the input `system_prompt`, and of chats without a system message.",
    )
    prompt_template: str | None = Field(
        None,
        description="Default of the input `prompt_template`. Unset: the model's chat template.",
    )
    chat_template: OptionalPath = Field(
        None,
        description="File with a chat template (Jinja), in place of the model's: one that knows"
        " tools, for example.",
    )
    tool_call_parser: ToolCallParser = Field(
        "auto",
        description="Format of the model's tool calls: `hermes` (also Qwen), `llama3_json`,"
        " `mistral`, `pythonic`, or `none`. `auto` knows it from the chat template.",
    )
    reasoning_parser: ReasoningParser = Field(
        "auto",
        description="Marks around the model's reasoning: `think` (`<think>`), `mistral`"
        " (`[THINK]`), or `none`. `auto` knows them from the chat template.",
    )
    stop_sequences: str | None = Field(
        None, description="Default of the input `stop_sequences`, separated by commas."
    )
    end_id: OptionalInt = Field(
        None,
        ge=-1,
        description="End-of-sequence token id; -1 never ends early. Unset: the engine's.",
    )
    pad_id: OptionalInt = Field(None, ge=-1, description="Padding token id. Unset: the engine's.")
    max_sequence_length: OptionalInt = Field(
        None, ge=1, description="Prompt and output together, in tokens. Unset: the engine's."
    )
    log_performance_metrics: bool = Field(
        False, description="Write the metrics of every prediction to its log."
    )

    port: Port = Field(5000, description="Cog's HTTP port.")
    cog_triton_drain_file: OptionalPath = Field(None, description="File that asks for a drain.")
    cog_probe_period: float = Field(
        1, gt=0, description="Seconds between liveness probes of Cog, parent and worker."
    )
    cog_probe_timeout: float = Field(
        5, gt=0, description="Seconds until a probe of Cog without an answer has failed."
    )
    cog_probe_failures: int = Field(
        3, ge=1, description="Failed probes of Cog in a row before the server exits (E2105)."
    )
    cog_max_concurrency: int = Field(
        1,
        ge=1,
        description="Predictions that Cog takes at once, waiting ones included; HTTP 503 beyond."
        " At most 500, which `cog-triton serve` and the runner images set.",
    )
    max_concurrency: OptionalInt = Field(
        None,
        ge=1,
        description="Requests in the engine at once. Unset: the engine's batch size.",
    )
    max_queue: OptionalInt = Field(
        None,
        ge=0,
        description="Requests that may wait; E2107 beyond. Unset: four times those in the engine,"
        " 64 at least.",
    )
    drain_timeout: float = Field(
        25, ge=0, description="Seconds that running requests get to end in, once told to stop."
    )
    cog_host: str = Field(
        "127.0.0.1",
        description="Address of every public port but Triton's, if `TRITON_HOST` is set.",
    )
    openai_port: OptionalPort = Field(
        None,
        description="Port of the OpenAI API and of /metrics; 0 or unset is off. `cog-triton"
        " serve` sets 8080.",
    )
    openai_page: bool = Field(True, description="A page to try the model, at `/` (openai.md).")
    cog_triton_api_key: OptionalSecret = Field(
        None,
        description="Key that requests must bring, on every port but gRPC's; health checks need"
        " none (security.md).",
    )
    openai_api_key: OptionalSecret = Field(None, description="Old name of `COG_TRITON_API_KEY`.")
    cog_triton_key_at_door: bool = Field(
        False,
        description="Whether requests bring a key to the front door, which keeps it; that sets it.",
    )
    metrics_public: bool = Field(False, description="Leave /metrics open where a key is set.")
    served_model_name: OptionalText = Field(
        None,
        description="Name of the model in the OpenAI API. Unset: the manifest's `model_id`.",
    )
    max_request_bytes: int = Field(
        8 << 20, ge=1, description="Longest request body on any port, in bytes; 413 beyond."
    )
    max_header_bytes: int = Field(
        32 << 10,
        ge=256,
        description="Most bytes of a request's first line and headers; 431 beyond.",
    )
    max_json_depth: int = Field(
        64, ge=1, description="How deep arrays and objects of a body may be nested; 400 beyond."
    )
    max_json_values: int = Field(
        32768,
        ge=1,
        description="Most values of a body's JSON, 400 beyond. In `/v1`, eight token ids count as"
        " one; numbers of Triton's tensors do not count.",
    )
    max_connections: int = Field(
        4096,
        ge=1,
        description="Connections of clients on all ports together; less where the limit of open"
        " files is lower. A new one takes the place of the oldest that awaits no answer; 503 if"
        " there is none.",
    )
    request_timeout: float = Field(
        30, gt=0, description="Seconds from a request's first byte to its last; 408 beyond."
    )
    idle_timeout: float = Field(
        75,
        gt=0,
        description="Seconds until a connection is closed that asks for nothing, or that does not"
        " read its answer.",
    )
    webhook_hosts: str = Field(
        "",
        description="Hosts that webhooks may go to, separated by commas: names, `*.domain`,"
        " addresses or networks; `*` for every host, `none` for none. Unset: every host with public"
        " addresses, and this machine where Cog binds loopback.",
    )
    max_sequences: int = Field(
        64,
        ge=1,
        description="Sequences of a request to `/v1`, which are its prompts times `n` or `best_of`;"
        " E1005 beyond. Each takes a place of its own among `MAX_CONCURRENCY`. Of embeddings, so"
        " many run at once.",
    )
    max_messages: int = Field(
        4096, ge=1, description="Messages of a chat, and parts of one message; E1005 beyond."
    )
    image_hosts: str = Field(
        "",
        description="Hosts that images of `http(s)` URLs may come from, as in `WEBHOOK_HOSTS`; a"
        " private address only if the list names it or its network. Unset: none.",
    )
    max_images: int = Field(16, ge=0, description="Images of a request; E1005 beyond.")
    max_image_bytes: int = Field(16 << 20, ge=1, description="Bytes of all of them; E1005 beyond.")
    max_image_pixels: int = Field(32_000_000, ge=1, description="Their pixels; E1005 beyond.")
    max_stop_sequences: int = Field(
        64, ge=1, description="Stop strings of a request, also bad words; E1005 beyond."
    )
    max_stop_length: int = Field(
        1024, ge=1, description="Characters of one stop string or bad word; E1005 beyond."
    )
    log_format: Annotated[
        Literal["json", "console"], BeforeValidator(lambda value: value or "json")
    ] = Field(
        "json",
        description="Format of the log, Cog's included: `json` or `console`, which `cog-triton"
        " serve` sets.",
    )
    log_level: LogLevel = Field(
        "info",
        description="Lowest level of our own log lines: `debug`, `info`, `warning` or `error`.",
    )
    log_requests: bool = Field(True, description="Write a log line for each request.")
    metrics_port: OptionalPort = Field(None, description="Port of /metrics and /health; 0 is off.")

    world_size: OptionalInt = Field(
        None, ge=1, description="Ranks of the engine, with a GPU for each. Unset: the engine's."
    )
    cog_triton_rank: OptionalInt = Field(
        None,
        ge=0,
        description="The one rank to start here, where a launcher starts each (multi-gpu.md).",
    )
    lws_worker_index: OptionalInt = Field(
        None, ge=0, description="This node of a vLLM engine; 0 answers requests (multi-gpu.md)."
    )
    lws_leader_address: OptionalText = Field(None, description="Address of node 0.")
    mpirun: OptionalPath = Field(None, description="Open MPI's mpirun. Unset: the one in `PATH`.")
    mpirun_args: str = Field("", description="More options for mpirun.")
    mpi_hosts: str | None = Field(
        None, description="Machines of the ranks, this one first, separated by commas."
    )
    trtllm_orchestrator: bool = Field(False, description="TensorRT-LLM's orchestrator mode.")
    trtllm_orchestrator_spawn_processes: bool = Field(
        True, description="Whether the orchestrator starts the ranks itself."
    )
    triton_host: str = Field(
        "127.0.0.1",
        description="Address of Triton's ports. Behind the front door, which `cog-triton serve` and"
        " images have: `COG_HOST` if unset.",
    )
    triton_http_port: Port = Field(8000, description="Triton's HTTP port.")
    triton_grpc_port: Port = Field(
        8001, description="Triton's gRPC port, of this machine alone: on 127.0.0.1."
    )
    triton_metrics_port: Port = Field(8002, description="Triton's metrics port.")
    triton_timeout: float = Field(
        120, gt=0, description="Seconds without a byte from Triton before a request fails (E2101)."
    )
    triton_start_timeout: float = Field(
        300, gt=0, description="Seconds until Triton must be ready (E2106)."
    )
    triton_probe_period: float = Field(
        1, gt=0, description="Seconds between liveness probes of Triton."
    )
    triton_probe_timeout: float = Field(
        3, gt=0, description="Seconds until a probe without an answer means that Triton hangs."
    )
    triton_max_restarts: int = Field(
        5, ge=0, description="Failed restarts in a row before the server exits; 0: none is tried."
    )
    engine_replicas: int = Field(
        1, ge=1, le=64, description="Engines of the model, not of TensorRT-LLM (multi-gpu.md)."
    )
    spare_engine: bool = Field(False, description="A second engine to take over (parking.md).")
    park_checkpoint: bool = Field(
        True, description="Parked engines leave the GPU; else they only sleep (parking.md)."
    )
    swap_residence: float = Field(5, ge=0, description="Least seconds of a model's turn (--swap).")
    swap_drain: float = Field(60, ge=0, description="Seconds to end a turn in; then E2105.")
    cog_triton_swap: OptionalText = Field(None, description="Other models of --swap, as JSON.")
    cog_triton_engine_keeper_name: OptionalText = Field(None, description="Set to swap models.")
    triton_memory_limit: OptionalInt = Field(
        None,
        ge=1,
        description="MiB that tritonserver or a stub may hold; beyond, Triton is restarted once"
        " nothing runs, or after five minutes, and generations go on (supervision.md). Unset: no"
        " limit.",
    )
    resume: bool = Field(
        True,
        description="Whether generations whose engine dies wait for its restart, and go on"
        " (supervision.md); 0 ends them with E2105.",
    )
    resume_timeout: float = Field(300, gt=0, description="Seconds that they wait, from each death.")
    canary: Literal["off", "warn", "require"] = Field(
        "warn",
        description="What follows if the engine answers its canary otherwise than when built:"
        " `warn` logs E2112, `require` does not start; `off` does not ask it (rolling.md).",
    )
    tritonserver: OptionalPath = Field(
        None, description="Path of the tritonserver binary. Unset: the one that is found."
    )
    tritonserver_backend_dir: OptionalPath = Field(
        None, description="Directory of Triton's backends. Unset: the one beside tritonserver."
    )

    @property
    def work_dir(self) -> Path:
        """Directory of unpacked engines and run-time files: COG_TRITON_WORK_DIR, else the cache."""
        if self.cog_triton_work_dir:
            return self.cog_triton_work_dir
        cache = os.environ.get("XDG_CACHE_HOME") or os.environ.get("HOME", "") + "/.cache"
        home = Path(cache)
        try:
            usable = home if os.access(home.parent, os.W_OK) else Path(tempfile.gettempdir())
        except FileNotFoundError as error:
            raise InvalidArgument(
                "COG_TRITON_WORK_DIR is unset, and neither the home directory nor /tmp can be"
                " written: set it to a directory that can"
            ) from error
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
        """MPI_HOSTS as a list."""
        return [host.strip() for host in (self.mpi_hosts or "").split(",") if host.strip()]

    @property
    def plain_http_registries(self) -> tuple[str, ...]:
        """COG_TRITON_PLAIN_HTTP as a tuple."""
        named = (self.cog_triton_plain_http or "").split(",")
        return tuple(host.strip() for host in named if host.strip())

    @property
    def http_ports(self) -> dict[str, tuple[str, int]]:
        """Address and port of our own HTTP listeners that are on, by the name of the setting."""
        ports = {"OPENAI_PORT": self.openai_port, "METRICS_PORT": self.metrics_port}
        return {name: (self.cog_host, port) for name, port in ports.items() if port is not None}

    @property
    def api_key(self) -> str | None:
        """COG_TRITON_API_KEY, else OPENAI_API_KEY."""
        key = self.cog_triton_api_key or self.openai_api_key
        return key.get_secret_value() if key else None

    @property
    def public_triton_host(self) -> str:
        """Address of Triton's public ports: TRITON_HOST if it is set, else COG_HOST."""
        return self.triton_host if "triton_host" in self.model_fields_set else self.cog_host

    @property
    def public_ports(self) -> dict[str, tuple[str, int]]:
        """Address and port of each port of the front door, by the name of its setting."""
        return {
            "PORT": (self.cog_host, self.port),
            **self.http_ports,
            "TRITON_HTTP_PORT": (self.public_triton_host, self.triton_http_port),
            "TRITON_METRICS_PORT": (self.public_triton_host, self.triton_metrics_port),
        }

    @property
    def triton_ports(self) -> dict[str, tuple[str, int]]:
        """Address and port of each of Triton's endpoints, by the name of its setting."""
        return {
            "TRITON_HTTP_PORT": (self.triton_host, self.triton_http_port),
            "TRITON_GRPC_PORT": (_LOOPBACK, self.triton_grpc_port),
            "TRITON_METRICS_PORT": (self.triton_host, self.triton_metrics_port),
        }

    @property
    def triton_url(self) -> str:
        """URL of Triton for the serving process; Triton itself may bind every address."""
        return f"http://{url_host(self.triton_host)}:{self.triton_http_port}"


def load_settings(**overrides: object) -> Settings:
    """Settings from the environment; raises E1005 naming the variable, value and rule."""
    for name, reason in _REMOVED.items():
        if (value := os.environ.get(name, "")).lower() not in _OFF:
            raise InvalidArgument(f"{name}={value!r}: {reason}")
    try:
        return Settings(**overrides)  # type: ignore[arg-type]
    except ValidationError as error:
        problems = [
            f"{str(item['loc'][0]).upper()}={item['input']!r}: {item['msg']}"
            for item in error.errors()
        ]
        raise InvalidArgument("; ".join(problems)) from error


def url_host(host: str) -> str:
    """Host part of a URL for `host`, an address that a server on this machine binds."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
