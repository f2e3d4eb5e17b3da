"""tritonclient: inference by HTTP and gRPC, streams, metadata, errors, what stops a generation."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as httpclient
import tritonclient.http.aio as http_aio
from cases import PROMPT
from checks import check, main, raises, server, until
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

STREAMING, WHOLE = server("openvino"), server("whole")
MODELS = ("ensemble", "tensorrt_llm_bls")
ENDLESS, STOPPED_S = 6000, 10
"""Tokens that take longer than the seconds."""
TYPES: dict[type, Any] = {str: np.object_, int: np.int32, float: np.float32, bool: np.bool_}


def inputs(kind: Any, **values: Any) -> list[Any]:
    """Inputs of shape [1, n] as `kind`, tritonclient's http or grpc module, has them."""
    found = []
    for name, value in values.items():
        items = value if isinstance(value, list) else [value]
        array = np.array([items], dtype=TYPES[type(items[0])])
        tensor = kind.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        found.append(tensor)
    return found


def asked(kind: Any, size: int = 4, **values: Any) -> list[Any]:
    return inputs(kind, text_input=PROMPT, max_tokens=size, temperature=0.0, **values)


def text(result: Any) -> str:
    """The text output, which is bytes, but in JSON."""
    found = result.as_numpy("text_output").flatten()[0]
    return found.decode() if isinstance(found, bytes) else found


def answers_of(begin: Callable[[Callable[..., None]], Any]) -> tuple[queue.Queue[Any], Any]:
    """The queue of results and errors of what `begin` begins with a callback, and its own value."""
    answers: queue.Queue[Any] = queue.Queue()
    return answers, begin(lambda result, error: answers.put(error or result))


def stream(client: Any, model: str, size: int, **values: Any) -> queue.Queue[Any]:
    answers, _ = answers_of(client.start_stream)
    given = asked(grpcclient, size, stream=True, **values)
    client.async_stream_infer(model, given, request_id="1", enable_empty_final_response=True)
    return answers


@check
def http_infer() -> None:
    with httpclient.InferenceServerClient(WHOLE.http) as client:
        for model in MODELS:
            answer = text(client.infer(model, asked(httpclient)))
            assert answer.startswith(f"{PROMPT} Paris"), answer
        pending = [client.async_infer(MODELS[0], asked(httpclient)) for _ in range(2)]
        assert all(text(one.get_result()).startswith(PROMPT) for one in pending)


@check
def http_infer_with_chosen_outputs_compressed() -> None:
    for binary, algorithm in ((True, "gzip"), (False, "deflate")):
        outputs = [httpclient.InferRequestedOutput("text_output", binary_data=binary)]
        with httpclient.InferenceServerClient(WHOLE.http) as client:
            answer = client.infer(
                MODELS[0],
                asked(httpclient),
                outputs=outputs,
                request_id="a",
                request_compression_algorithm=algorithm,
                response_compression_algorithm=algorithm,
            )
        assert answer.get_response()["id"] == "a"
        assert [one["name"] for one in answer.get_response()["outputs"]] == ["text_output"]
        assert " Paris" in text(answer)


@check
def http_infer_of_asyncio() -> None:
    async def ask() -> str:
        async with http_aio.InferenceServerClient(WHOLE.http) as client:
            return text(await client.infer(MODELS[0], asked(http_aio)))

    assert " Paris" in asyncio.run(ask())


@check
def grpc_infer() -> None:
    with grpcclient.InferenceServerClient(WHOLE.grpc) as client:
        for model in MODELS:
            assert " Paris" in text(client.infer(model, asked(grpcclient)))
        answers, _ = answers_of(lambda put: client.async_infer(MODELS[0], asked(grpcclient), put))
        assert " Paris" in text(answers.get(timeout=60))


@check
def grpc_infer_of_token_ids() -> None:
    ids = [504, 3575, 282, 4649, 314]
    given = {"request_output_len": 3, "end_id": -1, "runtime_top_k": 1}
    given_inputs = inputs(grpcclient, input_ids=ids, input_lengths=len(ids), **given)
    with grpcclient.InferenceServerClient(WHOLE.grpc) as client:
        found = client.infer("tensorrt_llm", given_inputs).as_numpy("output_ids")
    assert found.flatten().tolist()[:5] == ids
    assert found.size == 8


@check
def grpc_stream() -> None:
    for model in MODELS:
        pieces = []
        with grpcclient.InferenceServerClient(STREAMING.grpc) as client:
            answers = stream(client, model, 8)
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
    with grpcclient.InferenceServerClient(STREAMING.grpc) as client:
        text(stream(client, MODELS[0], ENDLESS, end_id=-1).get(timeout=60))
        until(lambda: STREAMING.engine_requests() == 1)
        client.stop_stream(cancel_requests=True)
        until(lambda: STREAMING.engine_requests() == 0, STOPPED_S)
    with grpcclient.InferenceServerClient(WHOLE.grpc) as client:
        given = asked(grpcclient, ENDLESS, end_id=-1)
        answers, call = answers_of(lambda put: client.async_infer(MODELS[0], given, put))
        until(lambda: WHOLE.engine_requests() == 1)
        call.cancel()
        assert "CANCELLED" in str(answers.get(timeout=60))
        until(lambda: WHOLE.engine_requests() == 0, STOPPED_S)


@check
def a_stop_request_stops_the_generation_of_its_id() -> None:
    with grpcclient.InferenceServerClient(STREAMING.grpc) as client:
        text(stream(client, MODELS[0], ENDLESS, end_id=-1).get(timeout=60))
        stop = inputs(grpcclient, text_input="", max_tokens=1, stop=True)
        client.async_stream_infer(MODELS[0], stop, request_id="1")
        until(lambda: STREAMING.engine_requests() == 0, STOPPED_S)


@check
def errors_are_its_exceptions() -> None:
    def refused(kind: Any, url: str, model: str = MODELS[0], **values: Any) -> str:
        with kind.InferenceServerClient(url) as client:
            given = asked(kind, **values)
            return str(raises(InferenceServerException, lambda: client.infer(model, given)))

    assert "unknown model" in refused(httpclient, WHOLE.http, "absent")
    assert "E1005" in refused(httpclient, WHOLE.http, top_p=7.0)
    assert "decoupled" in refused(grpcclient, STREAMING.grpc)


@check
def health_metadata_config_and_statistics() -> None:
    for kind, url in ((httpclient, WHOLE.http), (grpcclient, WHOLE.grpc)):
        with kind.InferenceServerClient(url) as client:
            assert client.is_server_live()
            assert client.is_server_ready()
            for model in (*MODELS, "tensorrt_llm", "preprocessing", "postprocessing"):
                assert client.is_model_ready(model)
            client.get_server_metadata()
            client.get_model_metadata(MODELS[0])
            client.get_model_config(MODELS[0])
            client.get_inference_statistics(MODELS[0])
            if kind is httpclient:  # gRPC's is not published
                client.get_model_repository_index()


if __name__ == "__main__":
    main()
