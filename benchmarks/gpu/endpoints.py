"""HTTP endpoints that are measured: the request of each, and the output in its answer."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prompts import Prompt

from cog_triton.bench.http_client import Origin, encode_request


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI completions endpoint on one port; `name` is its name in results.

    Every event with text or token ids contains `mark`. Sampling is greedy and ignores the end
    token; for /predictions that is up to the server's END_ID.
    """

    name: str
    port: int

    path = "/v1/completions"
    accept = "*/*"
    at_most = sys.maxsize  # requests at once
    mark = b'"text"'
    # Token counts of prompt and answer, in the events' text.
    counts = (rb'"prompt_tokens":\s*(\d+)', rb'"completion_tokens":\s*(\d+)')

    def body(self, prompt: Prompt, max_tokens: int) -> Mapping[str, Any]:
        """Body of a request."""
        return {
            "model": "verify",
            "prompt": prompt.text,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def request(self, prompt: Prompt, max_tokens: int) -> tuple[Origin, bytes]:
        """Where to send a request, and its bytes."""
        url = f"http://127.0.0.1:{self.port}{self.path}"
        headers = {"Accept": self.accept, "Connection": "close"}
        return encode_request(
            "POST", url, headers, json.dumps(self.body(prompt, max_tokens)).encode()
        )

    def tokens(self, answer: bytes) -> tuple[int, int]:
        """Prompt and output token counts that a whole answer reports; 0 where it reports none."""
        found = [re.findall(pattern, answer) for pattern in self.counts]
        return tuple(int(hits[-1]) if hits else 0 for hits in found)  # type: ignore[return-value]

    def output(self, answer: bytes) -> Any:
        """Generated text or token ids."""
        return "".join(
            choice["text"] for event in events(answer) for choice in event.get("choices", ())
        )


class Predictions(Endpoint):
    """Endpoint: Cog's /predictions."""

    path = "/predictions"
    accept = "text/event-stream"
    at_most = 480  # of the 500 that Cog's worker has threads for
    mark = b"event: output"
    counts = (rb'"input_token_count":\s*(\d+)', rb'"output_token_count":\s*(\d+)')

    def body(self, prompt: Prompt, max_tokens: int) -> Mapping[str, Any]:
        values = {"prompt": prompt.text, "prompt_template": "{prompt}", "max_tokens": max_tokens}
        return {"input": {**values, "temperature": 0}}

    def output(self, answer: bytes) -> Any:
        completed = [event["output"] for event in events(answer) if "output" in event]
        return "".join(completed[-1]) if completed else ""


class TritonIds(Endpoint):
    """Endpoint: Triton's model tensorrt_llm, in token ids."""

    path = "/v2/models/tensorrt_llm/generate_stream"
    mark = b'"output_ids"'

    def body(self, prompt: Prompt, max_tokens: int) -> Mapping[str, Any]:
        values = {"input_ids": prompt.ids, "input_lengths": len(prompt.ids), "end_id": -1}
        return {**values, "request_output_len": max_tokens, "streaming": True, "runtime_top_k": 1}

    def tokens(self, answer: bytes) -> tuple[int, int]:
        lists = re.findall(rb'"output_ids":(\[[^]]*\]|\d+)', answer)
        asked = re.search(rb'"error"', answer) is None
        return (-1 if asked else 0), sum(1 + ids.count(b",") for ids in lists if ids != b"[]")

    def output(self, answer: bytes) -> Any:
        lists = [event.get("output_ids", []) for event in events(answer)]
        return [item for ids in lists for item in (ids if isinstance(ids, list) else [ids])]


class TritonText(Endpoint):
    """Endpoint: Triton's model vllm_model, in text."""

    path = "/v2/models/vllm_model/generate_stream"
    mark = b'"text_output"'
    counts = (rb'"num_input_tokens":(\d+)', rb'"num_output_tokens":(\d+)')

    def body(self, prompt: Prompt, max_tokens: int) -> Mapping[str, Any]:
        sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
        asked = {"return_num_input_tokens": True, "return_num_output_tokens": True}
        return {"text_input": prompt.text, "stream": True, **asked, **sampling}

    def tokens(self, answer: bytes) -> tuple[int, int]:
        given, made = (re.findall(pattern, answer) for pattern in self.counts)
        return int(given[-1]) if given else 0, sum(map(int, made))

    def output(self, answer: bytes) -> Any:
        return "".join(event.get("text_output", "") for event in events(answer))


def events(answer: bytes) -> list[dict[str, Any]]:
    """JSON objects in the server-sent events of an answer."""
    lines = re.findall(rb"^data: (\{.*\})\r?$", answer, re.MULTILINE)
    return [json.loads(line) for line in lines]
