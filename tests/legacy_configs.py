"""Legacy build configs: the original builder's quick start, and its examples' arguments."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from cog_triton.builder.config import BuildConfig, parse_config
from cog_triton.builder.translate import Translation, translate
from cog_triton.errors import UnknownArgument

TINY_GPT2 = """
model_id: sshleifer/tiny-gpt2
example_name: gpt
convert_to_ft:
  script: hf_gpt_convert.py
  output_dir: ./c-model/gpt2/1-gpu
  args:
    in-file: /src/models/sshleifer/tiny-gpt2
    out-dir: ./c-model/gpt2
    tensor-parallelism: 1
    storage-type: float16
build:
  script: build.py
  output_dir: ./engine_outputs/
  args:
    model_dir: ./c-model/gpt2/1-gpu
    output_dir: ./engine_outputs/
    # Keys without values are treated as flags
    use_gpt_attention_plugin:
    remove_input_padding:
"""

GPT2_MEDIUM = """
model_id: gpt2-medium
example_name: gpt
model_tar_url: https://example.com/gpt2-medium/model.tar
convert_to_ft:
  executable: "python"
  script: hf_gpt_convert.py
  output_dir: ./c-model/gpt2/1-gpu
  args:
    in-file: /src/models/gpt2-medium
    out-dir: ./c-model/gpt2
    tensor-parallelism: 1
    storage-type: float16
build:
  executable: "python"
  script: build.py
  output_dir: ./engine_outputs/
  args:
    model_dir: ./c-model/gpt2/1-gpu
    output_dir: ./engine_outputs/
    dtype: float16
    use_gpt_attention_plugin: float16
    hidden_act: gelu
    use_inflight_batching:
    paged_kv_cache:
    use_paged_context_fmha:
    enable_context_fmha:
    use_gemm_plugin: float16
    remove_input_padding:
    parallel_build:
"""

STARCODER = """
model_id: bigcode/starcoder
example_name: gpt
convert_to_ft:
  script: hf_gpt_convert.py
  output_dir: ./c-model/starcoder/1-gpu
  args:
    in-file: /src/models/bigcode/starcoder
    out-dir: /src/c-model/starcoder
    tensor-parallelism: 1
    storage-type: float16
    processes: 1
    smoothquant: 0.5
build:
  script: build.py
  output_dir: /src/engine_outputs/
  args:
    model_dir: /src/c-model/starcoder/1-gpu
    output_dir: /src/engine_outputs/
    dtype: float16
    use_gemm_plugin: float16
    use_gpt_attention_plugin:
    paged_kv_cache:
    remove_input_padding:
    int8_kv_cache:
    use_smooth_quant:
hf_token: your_token_here
"""

LLAMA_BUILD_PY = """
model_id: meta-llama/Llama-2-13b-chat-hf
example_name: llama
weight_format: safetensors
model_tar_url: https://example.com/Llama-2-13b-chat-hf/model.tar
build:
  script: build.py
  output_dir: ./engine_outputs_1/
  args:
    model_dir: /src/models/meta-llama/Llama-2-13b-chat-hf
    output_dir: ./engine_outputs/
    dtype: float16
    use_gpt_attention_plugin: float16
    use_inflight_batching: null
    paged_kv_cache: null
    use_gemm_plugin: float16
    remove_input_padding: null
    parallel_build: null
    enable_context_fmha: null
    max_batch_size: 1
    max_input_len: 500
    max_output_len: 500
    n_positions: 1000
"""

LLAMA_INT8_2GPU = """
model_id: meta-llama/Llama-2-13b-chat-hf
example_name: llama
convert_to_ft:
  executable: "python"
  script: convert_checkpoint.py
  output_dir: ./c-model/meta-llama/Llama-2-13b-chat-hf/int8/2-gpu
  args:
    model_dir: /src/models/meta-llama/Llama-2-13b-chat-hf
    output_dir: /src/c-model/meta-llama/Llama-2-13b-chat-hf/int8/2-gpu
    tp_size: 2
    dtype: float16
    use_weight_only:
    weight_only_precision: int8
build:
  executable: trtllm-build
  output_dir: ./engine_outputs/
  args:
    checkpoint_dir: /src/c-model/meta-llama/Llama-2-13b-chat-hf/int8/2-gpu
    output_dir: ./engine_outputs/
    remove_input_padding: enable
    context_fmha: enable
    gpt_attention_plugin: float16
    gemm_plugin: float16
    paged_kv_cache: enable
    workers: 4
    max_batch_size: 64
    max_input_len: 4096
    max_output_len: 4096
    use_paged_context_fmha: enable
    use_custom_all_reduce: disable
    max_num_tokens: 54474
"""

LLAMA_70B_4GPU = """
model_id: meta-llama/Llama-2-70b-hf
example_name: llama
weight_format: safetensors
convert_to_ft:
  executable: "python"
  script: convert_checkpoint.py
  output_dir: ./c-model/meta-llama/Llama-2-70b-hf
  args:
    model_dir: /src/models/meta-llama/Llama-2-70b-hf
    output_dir: ./c-model/meta-llama/Llama-2-70b-hf
    tp_size: 4
    storage-type: fp16
    load_by_shard:
build:
  executable: trtllm-build
  output_dir: ./engine_outputs/
  args:
    checkpoint_dir: /src/c-model/meta-llama/Llama-2-70b-hf
    output_dir: ./engine_outputs/
    remove_input_padding: enable
    context_fmha: enable
    gpt_attention_plugin: float16
    gemm_plugin: float16
    paged_kv_cache: enable
    workers: 2
    max_batch_size: 64
    max_input_len: 1024
    max_output_len: 512
"""

# The convert step was a comment: what the checkpoint came from is not said.
LLAMA_NO_CONVERT = """
model_id: meta-llama/Llama-2-13b-chat-hf
example_name: llama
weight_format: safetensors
model_tar_url: https://example.com/Llama-2-13b-chat-hf/model.tar
build:
  executable: trtllm-build
  output_dir: ./engine_outputs/
  args:
    checkpoint_dir: /src/c-model/meta-llama/Llama-2-13b-chat-hf
    output_dir: ./engine_outputs/
    gpt_attention_plugin: float16
    paged_kv_cache: enable
    workers: 1
"""

TRANSLATED = {
    "tiny-gpt2": TINY_GPT2,
    "gpt2-medium": GPT2_MEDIUM,
    "starcoder": STARCODER,
    "llama-build.py": LLAMA_BUILD_PY,
    "llama-int8-2gpu": LLAMA_INT8_2GPU,
    "llama-70b-4gpu": LLAMA_70B_4GPU,
}


def read(text: str) -> BuildConfig:
    return parse_config(text, "legacy.yaml")


def translated(config: BuildConfig, *offered: str) -> Translation:
    return translate(config, f"models/core/{config.example_name}", offered.__contains__)


def steps(config: BuildConfig) -> dict[str, Any]:
    return {name: step.model_dump(exclude_defaults=True) for name, step in config.steps()}


def gpt(
    convert: str = "", build: str = "", model_dir: str = "c/1-gpu", **top: object
) -> BuildConfig:
    """The quick start with other arguments, each given as a YAML mapping's inside."""
    return BuildConfig.model_validate(
        {
            "model_id": "m",
            "example_name": "gpt",
            "convert_to_ft": {
                "script": "hf_gpt_convert.py",
                "output_dir": "c/1-gpu",
                "args": yaml.safe_load(f"{{in-file: /src/models/m, out-dir: c, {convert}}}"),
            },
            "build": {
                "script": "build.py",
                "output_dir": "e",
                "args": yaml.safe_load(f"{{model_dir: {model_dir}, {build}}}"),
            },
            **top,
        }
    )


def llama(build: str, **top: object) -> BuildConfig:
    """A config whose build.py reads the model."""
    return BuildConfig.model_validate(
        {
            "model_id": "m",
            "example_name": "llama",
            "build": {
                "script": "build.py",
                "output_dir": "e",
                "args": yaml.safe_load(f"{{model_dir: /src/models/m, {build}}}"),
            },
            **top,
        }
    )


def modern(convert: str = "", build: str = "") -> BuildConfig:
    """A config for convert_checkpoint.py and trtllm-build, of any time."""
    return BuildConfig.model_validate(
        {
            "model_id": "m",
            "example_name": "llama",
            "convert": {
                "script": "convert_checkpoint.py",
                "output_dir": "c",
                "args": yaml.safe_load(f"{{model_dir: model, output_dir: c, {convert}}}"),
            },
            "build": {
                "executable": "trtllm-build",
                "output_dir": "e",
                "args": yaml.safe_load(f"{{checkpoint_dir: c, output_dir: e, {build}}}"),
            },
        }
    )


def refusal(config: BuildConfig) -> str:
    with pytest.raises(UnknownArgument) as caught:
        translated(config)
    return str(caught.value)


LLAMA_7B_1GPU = LLAMA_70B_4GPU.partition("    max_batch_size")[0] + "    max_batch_size: 8\n"
for old, new in (
    ("70b-hf", "7b-chat-hf"),
    ("tp_size: 4", "tp_size: 1"),
    ("workers: 2", "workers: 1"),
):
    LLAMA_7B_1GPU = LLAMA_7B_1GPU.replace(old, new)

ORIGINALS = {
    "cog-trt-llm-config": TINY_GPT2 + "merge: true\n",
    "gpt/config": TINY_GPT2,
    "gpt/gpt-medium-build-config": GPT2_MEDIUM,
    "gpt/starcoder": STARCODER,
    "llama/llama-2-7b-chat-1gpu": LLAMA_7B_1GPU,
    "llama/llama-2-7b-chat-int8-1gpu": LLAMA_INT8_2GPU.replace("13b", "7b")
    .replace("tp_size: 2", "tp_size: 1")
    .partition("    max_input_len")[0],
    "llama/llama-2-13b-chat-1gpu": LLAMA_NO_CONVERT,
    "llama/llama-2-13b-chat-sq-1gpu": LLAMA_NO_CONVERT + "    max_batch_size: 64\n"
    "    max_input_len: 4096\n    max_output_len: 4096\n    max_num_tokens: 54474\n",
    "llama/llama-2-13b-chat-int8-2gpu": LLAMA_INT8_2GPU,
    "llama/llama-2-70b-4gpu": LLAMA_70B_4GPU,
}
"""The original's own configs by their names in its examples, as far as what they ask for."""
