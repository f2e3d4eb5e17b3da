"""Double of vllm/envs.py."""

import os

from vllm.recorded_versions import IS_0_26

VLLM_V1_OUTPUT_PROC_CHUNK_SIZE = int(os.getenv("VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", "128"))
VLLM_USE_V2_MODEL_RUNNER = os.getenv("VLLM_USE_V2_MODEL_RUNNER", "1") == "1"
VLLM_BATCH_INVARIANT = os.getenv("VLLM_BATCH_INVARIANT", "0") == "1"
if not IS_0_26:
    VLLM_MAX_NUM_BAD_WORDS = int(os.getenv("VLLM_MAX_NUM_BAD_WORDS", "128"))
    VLLM_MAX_BAD_WORDS_TOTAL_TOKENS = int(os.getenv("VLLM_MAX_BAD_WORDS_TOTAL_TOKENS", "1024"))
