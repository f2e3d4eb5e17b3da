"""Licences: which libraries may be changed without --all-licences.

NVIDIA's own libraries have the same layout, but their licences do not allow changed copies.
Patterns match the end of a path, part by part.
"""

from __future__ import annotations

from pathlib import Path

_CLOSED = {
    "libtorch_nvshmem*": "carries NVSHMEM, under NVIDIA's licence",
    "libtensorrt_llm_nvrtc_wrapper*": "carries NVRTC, under NVIDIA's licence",
}
_OPEN = {
    "PyTorch, BSD-3-Clause": "libtorch*.so* libc10*.so*",
    "TensorRT-LLM, Apache-2.0": "libtensorrt_llm*.so* libnvinfer_plugin_tensorrt_llm.so*"
    " libtriton_tensorrtllm*.so* libth_common.so* libdecoder_attention*.so"
    " tensorrt_llm/bindings*.so tensorrt_llm/deep_ep/*.so",
    "vLLM, Apache-2.0, and what it vendors, MIT": "vllm/_*.so vllm/cumem_allocator*.so"
    " vllm/vllm_flash_attn/_*.so vllm/third_party/deep_gemm/_*.so",
    "NCCL, BSD-3-Clause": "libnccl.so*",
    "flash-attn, BSD-3-Clause": "flash_attn_2_cuda*.so flash_attn_3/_*.so flash_attn_3_cuda*.so",
    "torchvision, BSD-3-Clause": "torchvision/_C*.so",
    "Transformer Engine, Apache-2.0": "libtransformer_engine*.so transformer_engine_torch*.so",
    "Apex, BSD-3-Clause": "amp_C*.so bnp.*.so fast_layer_norm*.so fast_multihead_attn*.so"
    " focal_loss_cuda*.so fused_conv_bias_relu*.so fused_dense_cuda*.so fused_index_mul_2d*.so"
    " fused_layer_norm_cuda*.so fused_rotary_positional_embedding*.so"
    " fused_weight_gradient_mlp_cuda*.so generic_scaled_masked_softmax_cuda*.so"
    " group_norm_cuda*.so mlp_cuda*.so scaled_*softmax_cuda*.so syncbn*.so xentropy_cuda*.so",
}
_NVIDIA = (
    "libcu[a-z]*.so* libnpp*.so* libnvJitLink*.so* libnvinfer*.so* libnvjpeg*.so*"
    " libnvonnxparser*.so* libnvrtc*.so* libnvshmem*.so*"
)


def refusal(path: Path) -> str | None:
    """Reason to skip the file at `path`; None if it is known to be open source."""
    for pattern, reason in _CLOSED.items():
        if path.match(pattern):
            return reason
    if any(path.match(pattern) for patterns in _OPEN.values() for pattern in patterns.split()):
        return None
    if any(path.match(pattern) for pattern in _NVIDIA.split()):
        return "under NVIDIA's licence"
    return "not known to be open source"
