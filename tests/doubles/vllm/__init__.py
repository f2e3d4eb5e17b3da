"""A double of the part of vLLM 0.26 that `cog_triton.engines.vllm` uses.

Its model says the prompt again and again, one token a step. Names, fields and signatures are the
recorded ones (tests/unit/test_vllm_double.py). What is called is written to the file that
VLLM_DOUBLE_JOURNAL names, one JSON object a line; VLLM_DOUBLE_DELAY is the length of a step in
seconds; once the file VLLM_DOUBLE_DEATH exists the engine is dead.
"""

__version__ = "0.26.0"
