"""Mock family: detects, reads and renders a mock engine for the serving process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from google.protobuf import text_format

from cog_triton.artifact.lora_adapter import LoRALimits
from cog_triton.engines.base import (
    COALESCE,
    Abilities,
    EngineFamily,
    EngineLimits,
    ResumeRules,
)
from cog_triton.engines.mock.mock_directory import MODEL_FILE, read_model
from cog_triton.engines.mock.mock_request import INPUTS, MockOptions, MockRequest, request_of
from cog_triton.engines.request import EngineRequest
from cog_triton.text.guide import GuideKind
from cog_triton.text.sampling import ABILITIES

if TYPE_CHECKING:
    from cog_triton.settings import Settings

MAX_LORA_RANK = 64
_GUIDES: frozenset[GuideKind] = frozenset({"json_schema", "regex", "grammar"})


class MockFamily(EngineFamily):
    """Mock family, detected by ``mock.json``; `defaults` of requests are final after `render`."""

    name = "mock"
    engine_class = "cog_triton.engines.mock.engine:MockEngine"
    replicable = True
    request_decoder = "cog_triton.engines.mock.mock_request:decode_request"
    resume_rules = ResumeRules(imports="always")
    defaults = MockOptions()
    abilities = Abilities(top_log_probs=20, prompt_log_probs=True, sampling=frozenset(ABILITIES))

    @classmethod
    def matches(cls, directory: Path) -> bool:
        return (directory / MODEL_FILE).is_file()

    @classmethod
    def open(cls, directory: Path) -> Self:
        model = read_model(directory)
        family = cls(
            directory,
            EngineLimits(
                max_input_len=model.max_seq_len - 1,
                max_seq_len=model.max_seq_len,
                max_batch_size=MockOptions().max_batch_size,
                end_id=None,
                pad_id=None,
            ),
        )
        if model.answers:  # whoever scripts an answer has it fit the guide
            family.abilities = replace(cls.abilities, guides=_GUIDES)
        return family

    def lora_limits(self) -> LoRALimits:
        return LoRALimits(max_rank=MAX_LORA_RANK, max_loras=self.defaults.max_batch_size)

    def options(self, settings: Settings) -> Mapping[str, object]:
        """See `EngineFamily.options`: the MOCK_* settings."""
        return settings.mock_options

    def render(self, config: Any, arguments: Mapping[str, Any]) -> str:
        """See `EngineFamily.render`; arguments are the fields of `MockOptions`."""
        self.defaults = MockOptions.parse(arguments)
        joins = self.defaults.join and not self.defaults.is_flat_out
        options = {**asdict(self.defaults), COALESCE: joins}
        model_py = self.render_python(config, self.defaults.max_batch_size, options)
        for name, kind in INPUTS.items():
            own = f'input {{ name: "{name}" data_type: {kind} dims: [1] optional: true }}'
            text_format.Merge(own, config)
        return model_py

    def engine_request(self, request: EngineRequest, inputs: Mapping[str, Any]) -> MockRequest:
        """See `EngineFamily.engine_request`; `inputs` are those of `INPUTS`."""
        return request_of(request, inputs)
