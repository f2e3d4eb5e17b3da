"""tritonclient: HTTP inference, metadata, errors; with gRPC."""

from __future__ import annotations

import asyncio

import checks_tritonclient_grpc
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.http.aio as http_aio
from checks import check, main, raises
from triton_inputs import MODELS, PROMPT, STREAMING, WHOLE, asked, text
from tritonclient.utils import InferenceServerException

__all__ = ["checks_tritonclient_grpc"]


@check
def http_infer() -> None:
    with httpclient.InferenceServerClient(WHOLE.http) as client:
        for model in MODELS:
            answer = text(client.infer(model, asked(httpclient)))
            assert answer.startswith(f"{PROMPT} Paris"), answer
        pending = [client.async_infer(MODELS[0], asked(httpclient)) for _ in range(2)]
        assert all(text(one.get_result()).startswith(PROMPT) for one in pending)


@check
def http_infer_with_chosen_outputs() -> None:
    for binary in (True, False):
        outputs = [httpclient.InferRequestedOutput("text_output", binary_data=binary)]
        with httpclient.InferenceServerClient(WHOLE.http) as client:
            given = asked(httpclient)
            answer = client.infer(MODELS[0], given, outputs=outputs, request_id="a")
            assert answer.get_response()["id"] == "a"
            assert [one["name"] for one in answer.get_response()["outputs"]] == ["text_output"]


@check
def http_compression() -> None:
    for algorithm in ("gzip", "deflate"):
        with httpclient.InferenceServerClient(WHOLE.http) as client:
            answer = client.infer(
                MODELS[0],
                asked(httpclient),
                request_compression_algorithm=algorithm,
                response_compression_algorithm=algorithm,
            )
            assert " Paris" in text(answer)


@check
def http_infer_of_asyncio() -> None:
    async def ask() -> str:
        async with http_aio.InferenceServerClient(WHOLE.http) as client:
            return text(await client.infer(MODELS[0], asked(http_aio)))

    assert " Paris" in asyncio.run(ask())


@check
def errors_are_its_exceptions() -> None:
    with httpclient.InferenceServerClient(WHOLE.http) as client:
        missing = raises(
            InferenceServerException, lambda: client.infer("absent", asked(httpclient))
        )
        assert "unknown model" in str(missing)
        bad = raises(
            InferenceServerException,
            lambda: client.infer(MODELS[0], asked(httpclient, 4, top_p=7.0)),
        )
        assert "E1005" in str(bad), bad
    with grpcclient.InferenceServerClient(STREAMING.grpc) as client:
        refused = raises(
            InferenceServerException, lambda: client.infer(MODELS[0], asked(grpcclient))
        )
        assert "decoupled" in str(refused), refused


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
