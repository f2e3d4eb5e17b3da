from __future__ import annotations

from dataclasses import dataclass

from cog_triton.build.options import Options


@dataclass(frozen=True)
class KnownOptions:
    options: Options
    source: object


def known_options(script: str) -> KnownOptions | None:
    return None


def known_scripts() -> tuple[str, ...]:
    return ("models/core/gpt/convert_checkpoint.py", "quantization/quantize.py", "trtllm-build")
