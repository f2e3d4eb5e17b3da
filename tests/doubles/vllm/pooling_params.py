"""Double of vllm/pooling_params.py, as far as embeddings need it; in vLLM a msgspec.Struct."""

from dataclasses import dataclass
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind


@dataclass
class PoolingParams:
    use_activation: bool | None = None
    dimensions: int | None = None
    task: str | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY

    def verify(self, model_config: Any) -> None:
        if self.dimensions is None:
            return
        if not model_config.is_matryoshka:
            raise VLLMValidationError(
                f"Model {model_config.model!r} does not support Matryoshka embeddings; dimensions"
                f" must be unset (received dimensions={self.dimensions})."
            )
        if not 1 <= self.dimensions <= model_config.embedding_size:
            raise VLLMValidationError(
                f"Model {model_config.model!r} only supports dimensions in range"
                f" [1, {model_config.embedding_size}], got {self.dimensions}."
            )
