"""Settings of the engine that is served, and of the mock in place of one."""

from __future__ import annotations

from pydantic import Field

from cog_triton.environment_types import (
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

    @property
    def mock_options(self) -> dict[str, float]:
        """The MOCK_* settings that are set, by the names of the mock's own options."""
        return {
            name.removeprefix(_MOCK): value
            for name in type(self).model_fields
            if name.startswith(_MOCK) and (value := getattr(self, name)) is not None
        }
