"""Modules that LoRA adapters change, by TensorRT-LLM's names and by those of Hugging Face.

Apart from the tensors: the command line reads it, and has no use for numpy.
"""

from __future__ import annotations

from collections.abc import Mapping

# tensorrt_llm/lora_manager.py: LoraManager.LORA_MODULE_IDS, and the default names of modules in
# Hugging Face models, get_default_trtllm_modules_to_hf_modules.
MODULE_IDS: Mapping[str, int] = {
    "attn_qkv": 0,
    "attn_q": 1,
    "attn_k": 2,
    "attn_v": 3,
    "attn_dense": 4,
    "mlp_h_to_4h": 5,
    "mlp_4h_to_h": 6,
    "mlp_gate": 7,
}
HF_MODULES: Mapping[str, str] = {
    "attn_qkv": "qkv_proj",
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_dense": "o_proj",
    "mlp_h_to_4h": "gate_proj",
    "mlp_4h_to_h": "down_proj",
    "mlp_gate": "up_proj",
}
_FIRST_TASK = 1 << 32


def task_id(number: int) -> int:
    """The lora_task_id of an adapter; clients that bring their own weights have smaller ones."""
    return _FIRST_TASK + number
