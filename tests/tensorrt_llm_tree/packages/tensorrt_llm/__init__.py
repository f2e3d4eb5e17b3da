"""Fake TensorRT-LLM for building engines; needs no GPU and no other package.

The checkpoints are real: a Hugging Face model, its weights split over the ranks. The engines are
not: an engine is its checkpoint's bytes behind a header.
"""

from tensorrt_llm.version import __version__

print(f"[TensorRT-LLM] TensorRT-LLM version: {__version__}", flush=True)
