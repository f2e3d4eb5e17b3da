"""Settings of the engine that is served, of its supervision, and of the mock in place of one."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from cog_triton.settings.environment_types import (
    IMAGE_ENGINE_DIR,
    EngineDir,
    EngineName,
    OptionalBool,
    OptionalFloat,
    OptionalInt,
    OptionalPath,
    OptionalText,
    SettingsGroup,
)

_MOCK = "mock_"


class EngineSettings(SettingsGroup):
    """What is served: the engine, its configuration, its adapters."""

    title = "The engine"

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
    engine_dir: EngineDir = Field(
        IMAGE_ENGINE_DIR, description="Engine directory to serve, without `COG_WEIGHTS`."
    )
    cog_triton_config: OptionalPath = Field(
        None,
        description="Serve config, YAML: arguments of the Triton models (serve-config.md). Unset:"
        " `config.yaml` in the working directory, if that has the key `instantiate`.",
    )
    served_model_name: OptionalText = Field(
        None,
        description="Name of the model in the OpenAI API. Unset: the manifest's `model_id`.",
    )
    world_size: OptionalInt = Field(
        None, ge=1, description="Ranks of the engine, with a GPU for each. Unset: the engine's."
    )
    max_sequence_length: OptionalInt = Field(
        None, ge=1, description="Prompt and output together, in tokens. Unset: the engine's."
    )
    end_id: OptionalInt = Field(
        None,
        ge=-1,
        description="End-of-sequence token id; -1 never ends early. Unset: the engine's.",
    )
    pad_id: OptionalInt = Field(None, ge=-1, description="Padding token id. Unset: the engine's.")
    cog_triton_sm: str | None = Field(
        None,
        description="GPU architectures that an image is for, as `86` or `80,86`; another GPU is"
        " refused (E1305). Set in images.",
    )
    cog_triton_skip_preflight: bool = Field(
        False, description="Serve an engine that does not fit this machine, with a warning."
    )
    cog_triton_vllm_python: OptionalPath = Field(
        None,
        description="Python that has vLLM, if it is not Triton's own; `engine_python` of a serve"
        " config goes before it. `cog-triton serve` sets it to what `cog-triton setup vllm` made.",
    )
    cog_triton_vllm_untested: bool = Field(
        False,
        description="Serve with a version of vLLM that this cog-triton was never run with (E1305"
        " otherwise), with a warning at every start (vllm.md).",
    )
    seal: Literal["off", "preferred", "required"] = Field(
        "preferred",
        description="What follows if no seal of a vLLM engine fits this machine: `preferred`"
        " compiles it, with a warning, `required` does not start (E1305); `off` reads none"
        " (build.md).",
    )
    seal_sha256: OptionalText = Field(
        None,
        description="Digests, with commas between, of the sealed engines whose compiled code may"
        " run: of the manifest, as `cog-triton inspect` tells it, or in a registry. Unset: those"
        " alone that this user built on this host (security.md).",
    )
    seal_signer: OptionalText = Field(
        None,
        description="Public key (cosign.pub, or what `cosign verify --key` takes): compiled code of"
        " an engine that is signed by it in its registry may run, too. Needs cosign (security.md).",
    )
    compiler_cache_bytes: int = Field(
        4 << 30,
        ge=0,
        description="What the compilers of vLLM engines may leave in `compiler-caches` of the work"
        " directory, which spares the next start that work; beyond, a start removes what was unused"
        " for longest. 0: nothing is kept (vllm.md).",
    )
    lora_dir: OptionalPath = Field(
        None,
        description="Directory below which LoRA adapters may be loaded at run time, which also"
        " needs `COG_TRITON_API_KEY` (lora.md).",
    )
    max_lora_bytes: int = Field(
        4 << 30, ge=1, description="Largest LoRA adapter, in bytes; E1304 beyond."
    )

    @property
    def plain_http_registries(self) -> tuple[str, ...]:
        """COG_TRITON_PLAIN_HTTP as a tuple."""
        named = (self.cog_triton_plain_http or "").split(",")
        return tuple(host.strip() for host in named if host.strip())


class MockSettings(SettingsGroup):
    """The mock engine, and its rates."""

    title = "The mock engine"

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
    mock_answers: OptionalPath = Field(
        None, description="Script of answers, a file of JSON (mock.md). Unset: the passage."
    )

    @property
    def mock_options(self) -> dict[str, float]:
        """The MOCK_* settings that are set, by the names of the mock's own options."""
        return {
            name.removeprefix(_MOCK): value
            for name in type(self).model_fields
            if name.startswith(_MOCK) and not isinstance(value := getattr(self, name), Path | None)
        }


class SupervisionSettings(SettingsGroup):
    """When Triton and engines are restarted, spared and stopped."""

    title = "Supervision and shutdown"

    triton_timeout: float = Field(
        120, gt=0, description="Seconds without a byte from Triton before a request fails (E2101)."
    )
    triton_start_timeout: float = Field(
        300, gt=0, description="Seconds until Triton must be ready (E2106)."
    )
    triton_max_restarts: int = Field(
        5, ge=0, description="Failed restarts in a row before the server exits; 0: none is tried."
    )
    resume: bool = Field(
        True,
        description="Whether generations whose engine dies wait for its restart, and go on"
        " (supervision.md); 0 ends them with E2105.",
    )
    resume_timeout: float = Field(300, gt=0, description="Seconds that they wait, from each death.")
    engine_replicas: int = Field(
        1, ge=1, le=64, description="Engines of the model, not of TensorRT-LLM (multi-gpu.md)."
    )
    spare_engine: bool = Field(False, description="A second engine to take over (parking.md).")
    triton_memory_limit: OptionalInt = Field(
        None,
        ge=1,
        description="MiB that tritonserver or a stub may hold; beyond, Triton is restarted once"
        " nothing runs, or after five minutes, and generations go on (supervision.md). Unset: no"
        " limit.",
    )
    drain_timeout: float = Field(
        25, ge=0, description="Seconds that running requests get to end in, once told to stop."
    )
    canary: Literal["off", "warn", "require"] = Field(
        "warn",
        description="What follows if the engine answers its canary otherwise than when built:"
        " `warn` logs E2112, `require` does not start; `off` does not ask it (supervision.md).",
    )
