"""Names that 0.4.0 had and this release lacks: each is refused, with what to use instead.

A row stays for one minor release.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from cog_triton.errors import InvalidArgument

_UNSET = ("", "0", "false", "f", "no", "n", "off", "127.0.0.1")
_GRPC = "use Triton's HTTP port, or forward the gRPC port of 127.0.0.1 yourself (ssh -L)"
_SPARE = "SPARE_ENGINE=1 has a second engine ready (parking.md)"
_OIDC = "let a gateway check tokens and send a key of COG_TRITON_KEYS (tenants.md)"
_SWAP = "start a server for each model, behind a proxy that starts them by name (llama-swap)"
_NODES = "start the other nodes by `vllm serve --headless` (multi-gpu.md)"
_MPI = "ranks are started by mpirun, or by your launcher with COG_TRITON_RANK (multi-gpu.md)"
_AIPERF = "use aiperf or guidellm; --json has all metrics"
_BENCH = {
    "plot csv sweep slo prompt-file arrival batch-pause api tokenizer no-ignore-eos": _AIPERF,
    "verbose metrics-url": "use --json, and /metrics",
    "stream no-stream buffer-size": "use --output-method wait",
    "ignore-eos": "use --input ignore_eos=true",
}
_PROBES = "a Cog that stops or hangs is found without probes (supervision.md)"
_FIXED_PROBES = "Triton is asked each second, and hangs after 3 s (supervision.md)"
_FIXED = "the bound is the same for every server (security.md)"
_ROLL = "use a rolling update of Kubernetes, or two servers behind a proxy (deploy.md)"
REMOVED = {
    **dict.fromkeys(("TRITON_GRPC_PUBLIC", "TRITON_GRPC_HOST"), _GRPC),
    **dict.fromkeys(("PARK_ENGINE", "cog-triton park", "cog-triton serve --park"), _SPARE),
    "PARK_CHECKPOINT": "spare engines sleep (parking.md)",
    **{f"OIDC_{n}": _OIDC for n in ("ISSUER", "AUDIENCE", "JWKS_URL", "TENANT_CLAIM", "LEEWAY")},
    **dict.fromkeys(("SWAP_RESIDENCE", "SWAP_DRAIN", "COG_TRITON_SWAP"), _SWAP),
    **dict.fromkeys(("COG_TRITON_ENGINE_KEEPER_NAME", "cog-triton serve --swap"), _SWAP),
    **dict.fromkeys(("COG_PROBE_PERIOD", "COG_PROBE_TIMEOUT", "COG_PROBE_FAILURES"), _PROBES),
    **dict.fromkeys(("TRITON_PROBE_PERIOD", "TRITON_PROBE_TIMEOUT"), _FIXED_PROBES),
    **dict.fromkeys(("MAX_JSON_DEPTH", "MAX_STOP_LENGTH", "MAX_IMAGE_PIXELS"), _FIXED),
    "DETACHED_TIMEOUT": "a response without a reader ends after an hour (openai.md)",
    "MAX_LORAS_LOADED": "256 adapters may be loaded; start another server for more (lora.md)",
    "COG_TRITON_DRAIN_FILE": "send the server SIGTERM",
    "COG_TRITON_KEY_AT_DOOR": "set COG_TRITON_API_KEY",
    "COG_TRITON_TENANTS_AT_DOOR": "set COG_TRITON_KEYS (tenants.md)",
    "cog-triton roll": _ROLL,
    "cog-triton client": "use NVIDIA's tritonclient",
    **dict.fromkeys(("LWS_WORKER_INDEX", "cog-triton serve --node-rank"), _NODES),
    "cog-triton serve --leader": "set LWS_LEADER_ADDRESS, or master_addr in model.json",
    **dict.fromkeys(("TRTLLM_ORCHESTRATOR", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES"), _MPI),
    **dict.fromkeys(("executor_worker_path", "participant_ids"), _MPI),
    "speculative_decoding_fast_logits": _MPI,
    **{
        f"cog-triton serve --{name}": f"set MOCK_{name.upper().replace('-', '_')} (settings.md)"
        for name in ("step-ms", "jitter", "tokens-per-response", "join", "max-batch-size")
    },
    "cog-triton serve --no-join": "set MOCK_JOIN=false (settings.md)",
    "cog-triton serve --prefill": "set MOCK_PREFILL_MS (settings.md)",
    **{
        f"cog-triton bench --{name}": use for names, use in _BENCH.items() for name in names.split()
    },
    "REPORT_CUSTOM_METRICS": "see metrics.md",
    "llmapi.yaml": "serve the model with vLLM: `cog-triton migrate` writes its model.json",
    "cog-triton migrate --to": "migrate writes model.json for vLLM",
    "q4_1": "take q4_0 or q8_0",
    "cog-triton build --against-installed": "--check compares with the recorded options",
    "cog-triton prune --measure": "compress the files yourself, before and after",
}
"""What to use instead of each name: an environment variable, a command, a command's option
(``cog-triton serve --swap``), a file of a model, or a key or value of a config."""


def removed(name: str, value: object = None) -> InvalidArgument:
    """E1005 for a name of the table, with the value it was given, if any."""
    given = "" if value is None else f"={value!r}"
    return InvalidArgument(f"{name}{given} was removed: {REMOVED[name]}")


def check_environment() -> None:
    """Raise E1005 for a removed environment variable that is set to more than off."""
    for name in REMOVED.keys() & os.environ.keys():
        if (value := os.environ[name]).lower() not in _UNSET:
            raise removed(name, value)


def check_keys(keys: Iterable[str]) -> None:
    """Raise E1005 for the first removed one of a config's keys or values."""
    for key in keys:
        if key in REMOVED:
            raise removed(key)


def check_arguments(arguments: list[str]) -> None:
    """Raise E1005 for a removed command, or a removed option of the command that is first."""
    command = f"cog-triton {arguments[0]}"
    check_keys([command])
    for argument in arguments[1:]:
        if argument == "--":
            return
        check_keys([f"{command} {argument.partition('=')[0].replace('_', '-')}"])
