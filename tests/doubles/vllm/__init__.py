"""Double of the part of vLLM 0.26 that `cog_triton.engines.vllm` uses.

Its model repeats the prompt, one token a step. Names, fields and signatures are the recorded ones
(tests/unit/test_vllm_double.py). Calls are written to the file that VLLM_DOUBLE_JOURNAL names, one
JSON object a line; VLLM_DOUBLE_DELAY is the length of a step in seconds; once the file that
VLLM_DOUBLE_DEATH names exists, the engine is dead.
"""

__version__ = "0.26.0"
