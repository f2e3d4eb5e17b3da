"""Double of tensorrt_llm 1.2's LLM API: an engine whose model repeats the prompt."""

import os

from tensorrt_llm.llmapi import LLM, SamplingParams

__version__ = os.environ.get("TRTLLM_DOUBLE_VERSION", "1.2.1")
__all__ = ["LLM", "SamplingParams", "__version__"]
