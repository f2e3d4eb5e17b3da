"""TensorRT-LLM releases: inputs, outputs and names of each release's Triton backend.

An engine runs only under the release that built it, so its ``version`` determines the backend's
contract. The tables were made by comparing the tags of triton-inference-server/
tensorrtllm_backend (all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt and the names that
inflight_batcher_llm/src reads), v0.9.0 to v0.19.0. Its commit c2e65b8 (#749), made after the
0.19 branch, renamed min_length and random_seed: 0.20 is the first release with the new names.
The token counts came with NVIDIA/TensorRT-LLM#5445, between 0.21 and 1.0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cog_triton.errors import EngineIncompatible

Release = tuple[int, int]

OLDEST: Release = (0, 9)
_RENAMED_IN: Release = (0, 20)
_LEGACY_NAMES = {"min_tokens": "min_length", "seed": "random_seed"}

_INPUTS: Mapping[Release, str] = {
    (0, 10): "runtime_top_p_min runtime_top_p_decay runtime_top_p_reset_ids early_stopping"
    " beam_search_diversity_rate draft_acceptance_threshold",
    (0, 11): "decoder_input_ids decoder_input_lengths",
    (0, 13): "prompt_table_extra_ids",
    (0, 14): "num_return_sequences exclude_input_in_output context_phase_params",
    (0, 15): "encoder_input_features encoder_output_lengths cross_attention_mask",
    (0, 16): "skip_cross_attn_blocks",
    (0, 17): "retention_token_range_starts retention_token_range_ends"
    " retention_token_range_priorities retention_token_range_durations_ms"
    " retention_decode_priority retention_decode_duration_ms",
    (0, 19): "guided_decoding_guide_type guided_decoding_guide return_perf_metrics"
    " lookahead_window_size lookahead_ngram_size lookahead_verification_set_size"
    " mrope_rotary_cos_sin mrope_position_deltas",
    (1, 0): "return_num_input_tokens return_num_output_tokens",
}
_OUTPUTS: Mapping[Release, str] = {
    (0, 12): "batch_index",
    (0, 14): "sequence_index context_phase_params",
    (0, 16): "kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks",
    (0, 19): "arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns"
    " acceptance_rate total_accepted_draft_tokens total_draft_tokens",
    (1, 0): "num_input_tokens num_output_tokens",
}
_DECODING_MODES: Mapping[Release, str] = {
    (0, 10): "medusa",
    (0, 16): "redrafter lookahead eagle",
}


def _since(table: Mapping[Release, str]) -> dict[str, Release]:
    return {name: release for release, names in table.items() for name in names.split()}


INPUT_SINCE = _since(_INPUTS)
OUTPUT_SINCE = _since(_OUTPUTS)
DECODING_MODE_SINCE = _since(_DECODING_MODES)


@dataclass(frozen=True, slots=True)
class ReleaseContract:
    """Contract of one release's backend; names are those of 1.2 unless stated otherwise."""

    version: str
    release: Release

    @classmethod
    def of(cls, version: str) -> ReleaseContract:
        """The contract for an engine's ``version``, as "1.2.1" or "0.12.0.dev2024073000".

        Raises:
            EngineIncompatible: it is older than 0.9, or not a version.
        """
        match = re.match(r"(\d+)\.(\d+)", version)
        release = (int(match[1]), int(match[2])) if match else (0, 0)
        if release < OLDEST:
            raise EngineIncompatible(
                f"version={version!r} of config.json: TensorRT-LLM 0.9 is the oldest whose"
                " engines are served: build the engine anew"
            )
        return cls(version, release)

    @property
    def renamed(self) -> dict[str, str]:
        """Inputs that have another name in this release: {name in 1.2: its name}."""
        return dict(_LEGACY_NAMES) if self.release < _RENAMED_IN else {}

    @property
    def reuses_kv_cache(self) -> bool:
        """Whether KV cache reuse is on by default; so since 0.19."""
        return self.release >= (0, 19)

    @property
    def reads_guided_decoding(self) -> bool:
        """Whether the three settings of guided decoding must be there, even if empty."""
        return self.release >= (0, 19)

    @property
    def static_batching(self) -> bool:
        """Whether V1 exists; later releases fail with "Static batching type is deprecated"."""
        return self.release < _RENAMED_IN

    @property
    def scalars_have_a_dimension(self) -> bool:
        """Whether request_output_len, streaming and stop have one: no reshape before 0.12."""
        return self.release < (0, 12)

    def has_input(self, name: str) -> bool:
        """Whether the model ``tensorrt_llm`` takes this input."""
        return self.release >= INPUT_SINCE.get(name, OLDEST)

    def has_output(self, name: str) -> bool:
        """Whether the model ``tensorrt_llm`` can send this output."""
        return self.release >= OUTPUT_SINCE.get(name, OLDEST)

    def has_decoding_mode(self, name: str) -> bool:
        """Whether `decoding_mode` may have this value."""
        return self.release >= DECODING_MODE_SINCE.get(name, OLDEST)


def format_release(release: Release) -> str:
    """A release as text: "0.19"."""
    return f"{release[0]}.{release[1]}"
