"""Double of the part of vLLM 0.33 that `cog_triton.engines.vllm` uses.

Its model repeats the prompt, or goes on with one that repeats itself, one token a step. Names,
fields and signatures are those recorded of 0.33 (tests/unit/test_vllm_double.py);
VLLM_DOUBLE_VERSION is another version to report. Calls are written to the file that
VLLM_DOUBLE_JOURNAL names, one JSON object a line; VLLM_DOUBLE_LOAD is how long EngineCore loads,
and VLLM_DOUBLE_DELAY a step, in seconds; while the file that VLLM_DOUBLE_HOLD names exists, no
step is done; with VLLM_DOUBLE_SAMPLES, tokens are drawn as asked (v1/engine/sampler.py) and
guides obeyed; once the file that VLLM_DOUBLE_DEATH names exists, the engine removes it and is
dead. While the file that VLLM_DOUBLE_COMPILING names exists, a model is being compiled. The first
step of several sequences is of a new shape: it computes for VLLM_DOUBLE_SHAPE seconds.
"""

import os

__version__ = os.environ.get("VLLM_DOUBLE_VERSION") or "0.33.0"
