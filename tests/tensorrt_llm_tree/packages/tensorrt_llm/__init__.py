"""Fake TensorRT-LLM for building engines; needs no GPU and no other package.

Checkpoints and engines have the real names and configs, but no weights: a rank of a checkpoint is a
digest of the model, and an engine is its checkpoint's bytes behind a header.
"""

from tensorrt_llm.version import __version__

print(f"[TensorRT-LLM] TensorRT-LLM version: {__version__}", flush=True)
