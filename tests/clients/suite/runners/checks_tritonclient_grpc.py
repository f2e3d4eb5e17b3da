"""tritonclient: gRPC inference and streams, and what stops a generation."""

from __future__ import annotations

import asyncio
import queue
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpc_aio
from checks import check, until
from triton_inputs import MODELS, STREAMING, WHOLE, asked, inputs, text

LONG = 1500


@check
def grpc_infer() -> None:
    with grpcclient.InferenceServerClient(WHOLE.grpc) as client:
        for model in MODELS:
            assert " Paris" in text(client.infer(model, asked(grpcclient)))
        answers: queue.Queue[Any] = queue.Queue()
        client.async_infer(
            MODELS[0], asked(grpcclient), lambda result, error: answers.put(error or result)
        )
        assert " Paris" in text(answers.get(timeout=60))


@check
def grpc_infer_of_token_ids() -> None:
    given = {"request_output_len": 3, "end_id": -1, "runtime_top_k": 1}
    ids = np.array([[504, 3575, 282, 4649, 314]], dtype=np.int32)
    tensor = grpcclient.InferInput("input_ids", [1, 5], "INT32")
    tensor.set_data_from_numpy(ids)
    with grpcclient.InferenceServerClient(WHOLE.grpc) as client:
        answer = client.infer(
            "tensorrt_llm", [tensor, *inputs(grpcclient, input_lengths=5, **given)]
        )
    found = answer.as_numpy("output_ids").flatten().tolist()
    assert found[:5] == ids[0].tolist()
    assert len(found) == 8


def stream(client: Any, model: str, given: list[Any]) -> queue.Queue[Any]:
    """Start a stream; the queue gets its results and errors."""
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put(error or result))
    client.async_stream_infer(model, given, request_id="1", enable_empty_final_response=True)
    return answers


@check
def grpc_stream() -> None:
    for model in MODELS:
        pieces = []
        with grpcclient.InferenceServerClient(STREAMING.grpc) as client:
            answers = stream(client, model, asked(grpcclient, 8, stream=True))
            while True:
                result = answers.get(timeout=60)
                if result.get_response().outputs:
                    pieces.append(text(result))
                if result.get_response().parameters["triton_final_response"].bool_param:
                    break
        assert "".join(pieces).startswith(" Paris"), pieces
        assert len(pieces) > 2


@check
def grpc_stream_of_asyncio() -> None:
    async def ask() -> str:
        async def requests() -> Any:
            yield {"model_name": MODELS[0], "inputs": asked(grpcclient, 8, stream=True)}

        found = ""
        async with grpc_aio.InferenceServerClient(STREAMING.grpc) as client:
            async for result, error in client.stream_infer(requests()):
                assert error is None
                found += text(result)
        return found

    assert asyncio.run(ask()).startswith(" Paris")


@check
def grpc_cancellation_stops_the_generation() -> None:
    given = asked(grpcclient, LONG, stream=True, end_id=-1)
    with grpcclient.InferenceServerClient(STREAMING.grpc) as client:
        answers = stream(client, MODELS[0], given)
        text(answers.get(timeout=60))
        until(lambda: STREAMING.engine_requests() == 1)
        client.stop_stream(cancel_requests=True)
        until(lambda: STREAMING.engine_requests() == 0, 5)
    ended: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(WHOLE.grpc) as client:
        call = client.async_infer(
            MODELS[0],
            asked(grpcclient, LONG, end_id=-1),
            lambda result, error: ended.put(error or result),
        )
        until(lambda: WHOLE.engine_requests() == 1)
        call.cancel()
        assert "CANCELLED" in str(ended.get(timeout=60))
        until(lambda: WHOLE.engine_requests() == 0, 5)


@check
def a_stop_request_stops_the_generation_of_its_id() -> None:
    with grpcclient.InferenceServerClient(STREAMING.grpc) as client:
        answers = stream(client, MODELS[0], asked(grpcclient, LONG, stream=True, end_id=-1))
        text(answers.get(timeout=60))
        stop = inputs(grpcclient, text_input="", max_tokens=1, stop=True)
        client.async_stream_infer(MODELS[0], stop, request_id="1")
        until(lambda: STREAMING.engine_requests() == 0, 5)
