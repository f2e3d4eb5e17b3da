"""The sample client of Triton's vllm_backend, samples/client.py: the requests of two releases.

Written from reading triton-inference-server/vllm_backend, r23.10 and r25.04 to r25.12.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpc_aio
from tritonclient.utils import np_to_triton_dtype

RELEASES = ("23.10", "25.04")


def run(
    url: str,
    release: str,
    prompts: list[str],
    *,
    streaming: bool = False,
    exclude_input_in_output: bool = False,
    model: str = "vllm_model",
) -> dict[str, str]:
    """One run of the client: the text of each request by its id; raises the first error."""
    return asyncio.run(_run(url, release, prompts, streaming, exclude_input_in_output, model))


async def _run(
    url: str, release: str, prompts: list[str], streaming: bool, exclude: bool, model: str
) -> dict[str, str]:
    sampling = {"temperature": "0.1", "top_p": "0.95"}
    if release != "23.10":
        sampling["max_tokens"] = "100"

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for place, prompt in enumerate(prompts):
            values: dict[str, Any] = {
                "text_input": np.array([prompt.encode()], dtype=np.object_),
                "stream": np.array([streaming], dtype=bool),
                "sampling_parameters": np.array([json.dumps(sampling).encode()], dtype=np.object_),
            }
            if release != "23.10":
                values["exclude_input_in_output"] = np.array([exclude], dtype=bool)
            yield {
                "model_name": model,
                "inputs": [_input(name, value) for name, value in values.items()],
                "outputs": [grpcclient.InferRequestedOutput("text_output")],
                "request_id": str(place),
                "parameters": sampling,  # sent twice
            }

    texts = {str(place): "" for place in range(len(prompts))}
    async with grpc_aio.InferenceServerClient(url) as client:
        async for result, error in client.stream_infer(requests()):
            if error is not None:
                raise error
            for item in result.as_numpy("text_output"):
                texts[result.get_response().id] += item.decode()
    return texts


def _input(name: str, value: npt.NDArray[Any]) -> grpcclient.InferInput:
    tensor = grpcclient.InferInput(name, [1], np_to_triton_dtype(value.dtype))
    tensor.set_data_from_numpy(value)
    return tensor
