"""Mock family: detects, reads and renders a mock engine for the serving process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from google.protobuf import text_format

from cog_triton.artifact.lora_adapter import LoRALimits
from cog_triton.engines.abilities import Abilities, ResumeRules
from cog_triton.engines.base import EngineFamily, EngineLimits
from cog_triton.engines.mock.mock_directory import MODEL_FILE, read_model
from cog_triton.engines.mock.mock_options import MockOptions
from cog_triton.engines.mock.mock_request import INPUTS
from cog_triton.text.sampling import ABILITIES

MAX_LORA_RANK = 64
_MODEL_PY = '''"""Written by cog_triton when the model repository was rendered."""

from cog_triton.engines.engine_client import engine_opener
from cog_triton.backend.token_model import make_token_model
from cog_triton.engines.mock.mock_request import decode_request

TritonPythonModel = make_token_model(
    engine_opener("cog_triton.engines.mock.engine:MockEngine"), decode_request
)
'''


class MockFamily(EngineFamily):
    """Mock family, detected by ``mock.json``; `defaults` of requests are final after `render`."""

    name = "mock"
    replicable = True
    request_decoder = "cog_triton.engines.mock.mock_request:decode_request"
    # Penalties do not change its text.
    resume_rules = ResumeRules(frequency_penalty="sequence", presence_penalty="sequence")
    defaults = MockOptions()
    abilities = Abilities(top_log_probs=20, prompt_log_probs=True, sampling=frozenset(ABILITIES))

    @classmethod
    def matches(cls, directory: Path) -> bool:
        return (directory / MODEL_FILE).is_file()

    @classmethod
    def open(cls, directory: Path) -> Self:
        model = read_model(directory)
        return cls(
            directory,
            EngineLimits(
                max_input_len=model.max_seq_len - 1,
                max_seq_len=model.max_seq_len,
                max_batch_size=MockOptions().max_batch_size,
                end_id=None,
                pad_id=None,
            ),
        )

    def lora_limits(self) -> LoRALimits:
        """See `EngineFamily.lora_limits`."""
        return LoRALimits(max_rank=MAX_LORA_RANK, max_loras=self.defaults.max_batch_size)

    def render(self, config: Any, arguments: Mapping[str, Any]) -> str:
        """See `EngineFamily.render`; arguments are the fields of `MockOptions`."""
        self.defaults = MockOptions.parse(arguments)
        config.backend = "python"
        config.max_batch_size = self.defaults.max_batch_size
        config.ClearField("dynamic_batching")  # the engine batches in flight by itself
        config.parameters.clear()
        config.parameters["engine_dir"].string_value = str(self.directory.resolve())
        for name, value in asdict(self.defaults).items():
            config.parameters[name].string_value = str(value)
        joins = self.defaults.join and not self.defaults.is_flat_out
        config.parameters["coalesce"].string_value = str(joins).lower()
        for name, kind in INPUTS.items():
            own = f'input {{ name: "{name}" data_type: {kind} dims: [1] optional: true }}'
            text_format.Merge(own, config)
        return _MODEL_PY
