"""Canary of a build: the greedy answer of the built engine, where its family is deterministic.

    python -m cog_triton.builder.canary_run openvino ENGINE_DIR

prints it as JSON, in the Python of the build's steps, which has the engine's library.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from cog_triton.artifact.canary import PROMPT, TOKENS, Canary
from cog_triton.engines.base import StepEngine
from cog_triton.engines.request import EngineRequest
from cog_triton.text.sampling import SamplingParams
from cog_triton.text.tokenizer import EngineTokenizer


def _openvino(directory: Path) -> StepEngine:
    from cog_triton.engines.openvino.engine import OpenVINOPipeline

    return OpenVINOPipeline.from_parameters({"engine_dir": str(directory)})


ENGINES: Mapping[str, Callable[[Path], StepEngine]] = {"openvino": _openvino}
"""Families that answer greedily alike at every start, and that a build can run where it builds."""


def canary_of(engine: StepEngine, input_ids: list[int]) -> Canary:
    """Canary of `TOKENS` tokens; raises the coded error that the engine answers with."""
    sampling = SamplingParams(max_tokens=TOKENS)
    engine.submit(1, EngineRequest(input_ids=input_ids, sampling=sampling, end_id=-1))
    made: list[int] = []
    while True:
        for _, event in engine.step():
            made += event.token_ids
            if event.error is not None:
                raise event.error
            if event.finish is not None:
                return Canary(input_ids=input_ids, output_ids=made)


def main(family: str, directory: Path) -> None:
    """Print the canary of the engine at `directory`."""
    ids = EngineTokenizer.load(directory).encode(PROMPT)
    print("\n" + canary_of(ENGINES[family](directory), ids).to_json(), end="", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
