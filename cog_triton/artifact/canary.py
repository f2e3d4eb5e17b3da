"""Canary of an engine: a prompt in token ids, and the ids that it is answered with greedily.

It is a file of its own, ``canary.json``, among those of the manifest, since readers of schema 1
refuse a manifest with keys that they do not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cog_triton.errors import CanaryFailed, EngineCorrupt
from cog_triton.system.printable import first_problem

CANARY_NAME = "canary.json"
PROMPT = "The capital of France is"
TOKENS = 8
"""How many of the answer's tokens are compared, where a config does not say."""
_SHOWN = 16


class Canary(BaseModel):
    """Token ids of a prompt, and of its greedy answer, end-of-sequence ids not ending it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    input_ids: list[int] = Field(min_length=1, max_length=4096)
    output_ids: list[int] = Field(min_length=1, max_length=256)

    def to_json(self) -> str:
        """Text of canary.json; equal for equal canaries."""
        return self.model_dump_json() + "\n"

    def require(self, answered: Sequence[int]) -> None:
        """Raise E2112 with both answers unless the engine has `answered` as it was built to."""
        if list(answered) != self.output_ids:
            raise CanaryFailed(
                f"the engine answers its canary with {list(answered)[:_SHOWN]}, where its build"
                f" had {self.output_ids[:_SHOWN]} ({CANARY_NAME}): other weights, another"
                " precision, or a fault of this machine"
            )


def load(engine_dir: Path) -> Canary | None:
    """Canary of an engine directory, None if it has none; raises E1306 if it cannot be read."""
    path = engine_dir / CANARY_NAME
    try:
        return Canary.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EngineCorrupt(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise EngineCorrupt(f"{path}: {first_problem(error)}") from error
