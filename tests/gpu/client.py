"""Client of our server's APIs: /predictions, OpenAI's API, Triton's models and metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
from servers import Ours

from cog_triton.engines import tensor_contract
from cog_triton.engines.request import EngineRequest

PATIENCE_S = 120


class Client:
    """Asks one server; answers are parsed JSON, whatever the status."""

    def __init__(self, server: Ours) -> None:
        self.server = server
        self._http = httpx.Client(timeout=PATIENCE_S)

    def predict(self, prompt: str, **values: Any) -> dict[str, Any]:
        """A whole prediction; its `text` is the output."""
        body = {"input": {"prompt": prompt, "temperature": 0, **values}}
        url = f"http://127.0.0.1:{self.server.cog}/predictions"
        answer: dict[str, Any] = self._http.post(url, json=body).json()
        return {**answer, "text": "".join(answer.get("output") or ())}

    @contextmanager
    def stream(self, prompt: str, **values: Any) -> Iterator[Iterator[tuple[str, Any]]]:
        """(event, data) pairs of a streamed prediction."""
        body = {"input": {"prompt": prompt, "temperature": 0, **values}}
        url = f"http://127.0.0.1:{self.server.cog}/predictions"
        headers = {"Accept": "text/event-stream"}
        with self._http.stream("POST", url, json=body, headers=headers) as response:
            yield self._events(response)

    def openai(self, path: str, **values: Any) -> dict[str, Any]:
        """An answer of /v1/`path`, with its HTTP status."""
        return self.post(f"v1/{path}", **{"model": "verify", "temperature": 0, **values})

    def post(self, path: str, **values: Any) -> dict[str, Any]:
        """An answer of a path on the OpenAI API's port, with its HTTP status."""
        response = self._http.post(f"http://127.0.0.1:{self.server.openai}/{path}", json=values)
        return {**response.json(), "status": response.status_code}

    def openai_stream(self, path: str, **values: Any) -> list[dict[str, Any]]:
        """The events of a streamed answer of /v1/`path`."""
        url = f"http://127.0.0.1:{self.server.openai}/v1/{path}"
        body = {"model": "verify", "temperature": 0, "stream": True, **values}
        with self._http.stream("POST", url, json=body) as response:
            return [data for _, data in self._events(response)]

    def models(self) -> list[str]:
        """Names in /v1/models."""
        told = self._http.get(f"http://127.0.0.1:{self.server.openai}/v1/models").json()
        return [model["id"] for model in told["data"]]

    def text(self, **values: Any) -> dict[str, Any]:
        """An answer of Triton's model vllm_model."""
        url = f"http://127.0.0.1:{self.server.triton}/v2/models/vllm_model/generate"
        answer: dict[str, Any] = self._http.post(url, json=values).json()
        return answer

    def events(self, request: EngineRequest) -> list[dict[str, Any]]:
        """All events of Triton's model tensorrt_llm."""
        url = f"http://127.0.0.1:{self.server.triton}/v2/models/tensorrt_llm/generate_stream"
        values = tensor_contract.encode_request(request)
        with self._http.stream("POST", url, json=values) as response:
            return [data for _, data in self._events(response)]

    def ids(self, request: EngineRequest) -> list[int]:
        """All token ids of Triton's model tensorrt_llm; raises RuntimeError for an error."""
        found: list[int] = []
        for event in self.events(replace(request, exclude_input_in_output=True)):
            if "error" in event:
                raise RuntimeError(event["error"])
            ids = event["output_ids"]
            found += ids if isinstance(ids, list) else [ids]
        return found

    def metrics(self) -> dict[str, float]:
        """Metrics under vLLM's names, by name with suffix."""
        text = self._http.get(f"http://127.0.0.1:{self.server.openai}/metrics").text
        lines = re.findall(r"^(vllm:\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in lines}

    @staticmethod
    def _events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
        event = ""
        for line in response.iter_lines():
            if line.startswith("event: "):
                event = line[7:]
            elif line.startswith("data: ") and line != "data: [DONE]":
                yield event, json.loads(line[6:])
