"""Double of vllm/engine/arg_utils.py: every argument that the record names."""

import json
from dataclasses import field, make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cog_triton.engines.vllm.argument_types import types_of
from vllm import __version__, envs
from vllm.usage.usage_lib import UsageContext

_DEFAULTS = {"gpu_memory_utilization": 0.9, "disable_log_stats": False}
_DEFAULTS |= {"enable_log_requests": False, "aggregate_engine_logging": False}


class ModelConfig(SimpleNamespace):
    def get_vocab_size(self) -> int:
        return 257


class EngineArgs:
    def create_engine_config(
        self, usage_context: UsageContext | None = None, headless: bool = False
    ) -> Any:
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError("gpu_memory_utilization: Input should be less than or equal to 1")
        return SimpleNamespace(
            usage_context=usage_context,
            use_v2_model_runner=envs.VLLM_USE_V2_MODEL_RUNNER,
            model_config=ModelConfig(
                model=self.model,
                max_model_len=self.max_model_len,
                most_images=self._most_images(),
                runner_type=self._runner_type(),
                convert=self.convert,
                is_matryoshka=self._config().get("is_matryoshka", False),
                embedding_size=self._config().get("hidden_size", 8),
            ),
            scheduler_config=SimpleNamespace(
                max_num_seqs=self.max_num_seqs or 1024,
                max_num_queued_reqs=getattr(self, "max_num_queued_reqs", None),
            ),
            parallel_config=SimpleNamespace(
                data_parallel_size=self.data_parallel_size or 1,
                nnodes=self.nnodes or 1,
                node_rank=self.node_rank or 0,
                master_addr=self.master_addr,
                master_port=self.master_port,
            ),
            speculative_config=self.speculative_config,
            structured_outputs_config=SimpleNamespace(
                reasoning_parser=(self.structured_outputs_config or {}).get("reasoning_parser"),
                enable_in_reasoning=False,
            ),
            cache_config=SimpleNamespace(block_size=16, num_gpu_blocks=1024),
            engine_args=self,
        )

    def _runner_type(self) -> str:
        """In vLLM the architecture decides where model.json says nothing."""
        if self.runner not in (None, "auto"):
            return self.runner
        names = self._config().get("architectures", [""])
        pools = self.convert not in (None, "auto", "none") or names[0].endswith("Model")
        return "pooling" if pools else "generate"

    def _most_images(self) -> int | None:
        """Images of a prompt, None for a model of text; in vLLM its processor's."""
        if "vision_config" not in self._config():
            return None
        given = (self.limit_mm_per_prompt or {}).get("image", 999)
        return 0 if self.language_model_only else given

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((Path(self.model) / "config.json").read_text())
        return config


AsyncEngineArgs = make_dataclass(
    "AsyncEngineArgs",
    [(name, Any, field(default=_DEFAULTS.get(name))) for name in types_of(__version__).engine_args],
    bases=(EngineArgs,),
)
AsyncEngineArgs.__module__ = __name__  # by which pickle finds it
