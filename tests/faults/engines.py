"""Engines that faults are tried on: how each is served, and the lengths of its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from faults import questions
from faults.answers import Question
from faults.questions import Lengths
from faults.target import Target

ENGINE_TAR = Path(__file__).parents[2] / "engine.tar"


@dataclass(frozen=True, slots=True)
class Profile:
    """Arguments and environment of ``cog-triton serve``; answers take some 1 to 4 s undisturbed."""

    arguments: tuple[str, ...]
    lengths: Lengths
    environment: Mapping[str, str] = field(default_factory=dict)
    is_model: bool = False
    has_adapter: bool = False

    async def questions(self, target: Target, seed: int) -> list[Question]:
        """Questions with known answers."""
        if not self.is_model:
            return questions.of_mock(self.lengths, seed)
        model = await target.model()
        return await asyncio.to_thread(questions.of_model, target.urls, model, self.lengths, seed)


PROFILES = {
    "mock": Profile(("--engine=mock",), Lengths(25, 100), {"MOCK_STEP_MS": "40"}, has_adapter=True),
    "openvino": Profile(
        (str(ENGINE_TAR),),
        Lengths(6, 14),
        {"PROMPT_TEMPLATE": "{prompt}"},  # as /v1/completions has it
        is_model=True,
    ),
}
