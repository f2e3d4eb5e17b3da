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
        description="This engine is served: engine.tar (also .tar.gz, .tar.zst, or a directory)"
        " by path or URL (`file`, `http(s)`, `s3`, `gs`, `az`), or `oci://REF` (oci.md). A cut"
        " download continues at the next start.",
    )
    cog_triton_plain_http: OptionalText = Field(
        None,
        description="`oci://` reaches these registries, with commas between, by HTTP without"
        " TLS; those of this machine in any case (oci.md).",
    )
    engine_dir: EngineDir = Field(
        IMAGE_ENGINE_DIR,
        description="The engine in this directory is served if `COG_WEIGHTS` is unset.",
    )
    cog_triton_config: OptionalPath = Field(
        None,
        description="This YAML file is the serve config: arguments of the Triton models"
        " (serve-config.md). Unset: `config.yaml` in the working directory, if that has the key"
        " `instantiate`.",
    )
    served_model_name: OptionalText = Field(
        None,
        description="The OpenAI API names the model so. Unset: the manifest's `model_id`.",
    )
    world_size: OptionalInt = Field(
        None,
        ge=1,
        description="The engine has so many ranks, with a GPU for each. Unset: the engine's.",
    )
    max_sequence_length: OptionalInt = Field(
        None,
        ge=1,
        description="A prompt and its output have so many tokens at most. Unset: the engine's.",
    )
    end_id: OptionalInt = Field(
        None,
        ge=-1,
        description="This token id ends a sequence; -1 ends none. Unset: the engine's.",
    )
    pad_id: OptionalInt = Field(
        None, ge=-1, description="The engine pads with this token id. Unset: the engine's."
    )
    cog_triton_sm: str | None = Field(
        None,
        description="The image is for these GPU architectures, as `80,86`, and refuses others"
        " (E1305). Images set it.",
    )
    cog_triton_skip_preflight: bool = Field(
        False, description="An engine that does not fit this machine is served, with a warning."
    )
    cog_triton_vllm_python: OptionalPath = Field(
        None,
        description="This Python has vLLM, if Triton's own has not. `cog-triton serve` sets it"
        " to the Python that `cog-triton setup vllm` made.",
    )
    cog_triton_vllm_untested: bool = Field(
        False,
        description="A version of vLLM that was never run with this cog-triton is accepted,"
        " with a warning, in place of E1305 (vllm.md).",
    )
    seal: Literal["off", "preferred", "required"] = Field(
        "preferred",
        description="If no seal of a vLLM engine fits this machine, `preferred` compiles the"
        " engine, with a warning, and `required` does not start (E1305); `off` reads no seal"
        " (build.md).",
    )
    seal_sha256: OptionalText = Field(
        None,
        description="Compiled code of the sealed engines with these digests may run: digests of"
        " the manifest, as `cog-triton inspect` shows them, or of a registry, with commas between."
        " If unset, only code that this user built on this host may run (security.md).",
    )
    seal_signer: OptionalText = Field(
        None,
        description="Compiled code of an engine that is signed with this key in its registry"
        " may run, too: a public key (cosign.pub), or what `cosign verify --key` takes. The check"
        " needs cosign (security.md).",
    )
    compiler_cache_bytes: int = Field(
        4 << 30,
        ge=0,
        description="The compilers of vLLM engines may leave this many bytes in"
        " `compiler-caches` of the work directory, which spares the next start that work; a start"
        " removes the least recently used beyond. 0 stores nothing (vllm.md).",
    )
    lora_dir: OptionalPath = Field(
        None,
        description="LoRA adapters below this directory may be loaded at run time, which also"
        " needs `COG_TRITON_API_KEY` (lora.md).",
    )
    max_lora_bytes: int = Field(
        4 << 30, ge=1, description="A LoRA adapter has so many bytes at most; E1304 beyond."
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
        None,
        ge=0,
        description="A stream of the mock makes so many tokens a second; 0 is flat out. Unset: 44.",
    )
    mock_step_ms: OptionalFloat = Field(
        None,
        ge=0,
        description="In a step of so many milliseconds every stream of the mock makes a token;"
        " 0 gives each stream a clock of its own. Unset: 0.",
    )
    mock_jitter: OptionalFloat = Field(
        None,
        ge=0,
        le=1,
        description="A token of the mock strays by this part of the time between two. Unset: 0.",
    )
    mock_prefill_ms: OptionalFloat = Field(
        None,
        ge=0,
        description="The mock takes so many milliseconds for each input token. Unset: 0.",
    )
    mock_tokens_per_response: OptionalInt = Field(
        None, ge=1, description="A response of the mock has so many tokens. Unset: 1."
    )
    mock_join: OptionalBool = Field(
        None, description="Tokens of the mock that are late share one response. Unset: true."
    )
    mock_max_batch_size: OptionalInt = Field(
        None, ge=1, description="The mock runs so many streams at once; more wait. Unset: 256."
    )
    mock_answers: OptionalPath = Field(
        None,
        description="The mock answers by the script in this JSON file (mock.md). Unset: the"
        " passage.",
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
        120,
        gt=0,
        description="A request fails after so many seconds without a byte from Triton (E2101).",
    )
    triton_start_timeout: float = Field(
        300, gt=0, description="A start of Triton fails after so many seconds (E2106)."
    )
    triton_max_restarts: int = Field(
        5,
        ge=0,
        description="The server exits after so many failed restarts in a row; 0 tries none.",
    )
    resume: bool = Field(
        True,
        description="Generations whose engine dies wait for its restart, and continue"
        " (supervision.md); 0 ends them with E2105.",
    )
    resume_timeout: float = Field(
        300,
        gt=0,
        description="Generations wait so many seconds for their engine, from each of its deaths.",
    )
    engine_replicas: int = Field(
        1,
        ge=1,
        le=64,
        description="So many engines of the model serve; not with TensorRT-LLM (multi-gpu.md).",
    )
    spare_engine: bool = Field(
        False,
        description="A second engine is loaded and sleeps until the first one dies (parking.md).",
    )
    triton_memory_limit: OptionalInt = Field(
        None,
        ge=1,
        description="Tritonserver or a stub may have so many MiB; beyond, Triton is restarted"
        " once nothing runs, or after five minutes, and generations continue (supervision.md)."
        " Unset: no limit.",
    )
    drain_timeout: float = Field(
        25, ge=0, description="Running requests get so many seconds to end in after SIGTERM."
    )
    canary: Literal["off", "warn", "require"] = Field(
        "warn",
        description="If the engine answers its canary otherwise than when built, `warn` logs"
        " E2112 and `require` does not start; `off` does not ask it (supervision.md).",
    )
