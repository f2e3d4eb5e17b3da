"""Benchmark of the step stream's carrier: Triton's messages, read as bytes."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest
from tritonclient.grpc import service_pb2

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def benchmarks() -> None:
    sys.path.insert(0, str(BENCHMARKS))


@pytest.mark.parametrize("count", [1, 64, 3000])
def test_a_step_is_what_protobufs_own_parser_reads(count: int) -> None:
    import step_carrier

    numbers = [(-1) ** n * n << (n % 50) for n in range(count)]
    answer = service_pb2.ModelInferResponse(model_name="engine_steps", id="a" * 300)
    answer.parameters["final"].bool_param = True
    for name in ("log_probs", "step", "step_errors"):
        answer.outputs.add(name=name, datatype="INT64", shape=[1, count])
        values = numbers if name == "step" else [7]
        answer.raw_output_contents.append(struct.pack(f"<{len(values)}q", *values))
    message = service_pb2.ModelStreamInferResponse(infer_response=answer)
    assert step_carrier.step_of(message.SerializeToString()) == ("", numbers)


def test_an_error_is_told() -> None:
    import step_carrier

    message = service_pb2.ModelStreamInferResponse(error_message="no such model")
    assert step_carrier.step_of(message.SerializeToString()) == ("no such model", [])
