"""Double of vllm/envs.py."""

import os

VLLM_V1_OUTPUT_PROC_CHUNK_SIZE = int(os.getenv("VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", "128"))
