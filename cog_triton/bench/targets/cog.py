"""Target: Cog's /predictions, of any predictor with a prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from cog_triton.bench.options import OutputMethod
from cog_triton.bench.prompt_source import Prompt
from cog_triton.bench.request_record import Record
from cog_triton.bench.targets.base import Failure, JSONObject, Target, failure, parse_object
from cog_triton.errors import InvalidArgument
from cog_triton.text import sse

_LENGTHS = ("n_output_tokens", "max_tokens", "max_new_tokens")
_LOGGED = {
    "tokens_per_second": re.compile(r"Serverside tokens per second: ([\d.]+)"),
    "predict_time": re.compile(r"Serverside execution time: ([\d.]+)"),
    "time_to_first_token": re.compile(r"Serverside time to first token: ([\d.]+)"),
    "output_token_count": re.compile(r"Tokens processed: (\d+)"),
}


class CogTarget(Target):
    """Cog server; streamed with ``Accept: text/event-stream`` if the server can, else whole."""

    name = "cog-triton"
    default_port = 5000
    start_hint = "start it with: cog-triton serve engine.tar (or name another --url)"

    async def prepare(self) -> None:
        """See `Target.prepare`."""
        answer = await self.get(f"{self.url}/openapi.json")
        try:
            paths, schemas = self._read(answer.text) if answer.status == 200 else ({}, {})
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise self.unavailable(f"{self.url}/openapi.json is not Cog's") from error
        if paths and "/predictions" not in paths:
            raise self.unavailable("there is something else: it has no /predictions")
        await self._require_ready()
        known = schemas.get("Input", {}).get("properties", {})
        post = paths.get("/predictions", {}).get("post", {})
        self._streamed = self.options.streamed
        if self._streamed and not post.get("x-cog-streaming"):
            self._streamed = False
            self.notes.append("The server does not stream (no x-cog-streaming): answers come whole")
        self._length = next((name for name in _LENGTHS if name in known), "max_tokens")
        self._fixed = self._inputs(known)

    async def _require_ready(self) -> None:
        health = await self.get(f"{self.url}/health-check")
        status = parse_object(health.text).get("status") if health.status == 200 else None
        if status not in (None, "READY", "BUSY"):
            raise self.unavailable(f"its /health-check says {status}")

    def _read(self, text: bytes) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        document = json.loads(text)
        return document["paths"], document.get("components", {}).get("schemas", {})

    def _inputs(self, known: Mapping[str, Any]) -> JSONObject:
        """Inputs that all requests share; raises E1005 for those that the server lacks."""
        options = self.options
        inputs: JSONObject = {}
        method = options.output_method
        if method and "output_method" in known:
            inputs["output_method"] = method.value
        elif method is OutputMethod.BUFFER:
            raise InvalidArgument(
                "--output-method=buffer: the server has no such input; only a mock has"
            )
        if options.buffer_size is not None:
            inputs["buffer_size"] = options.buffer_size
        if options.tps is not None:
            if "tps" in known:
                inputs["tps"] = options.tps
            else:
                self.notes.append("--tps is not sent: the server has no such input")
        self._shortest = options.ignore_eos is not False and "min_tokens" in known
        if options.ignore_eos and not self._shortest:
            raise InvalidArgument("--ignore-eos: the server has no input min_tokens")
        unknown = [name for name in options.inputs if known and name not in known]
        if unknown:
            raise InvalidArgument(
                f"--input {unknown[0]}: the server has no such input; it has {', '.join(known)}"
            )
        return {**inputs, **options.inputs}

    async def send(self, prompt: Prompt, record: Record) -> None:
        """See `Target.send`."""
        count = prompt.output_tokens
        inputs: JSONObject = {"prompt": prompt.text, self._length: count, **self._fixed}
        if self._shortest and self._length != "n_output_tokens":
            inputs.setdefault("min_tokens", count)
        completed = b""

        def event(data: bytes) -> int:
            nonlocal completed
            if data.startswith(b"event: output"):
                return 1
            if sse.event_name(data) == b"completed":
                completed = sse.event_data(data)
            return int(sse.event_name(data) == b"output")

        accept = "text/event-stream" if self._streamed else "application/json"
        answer = await self.post(
            f"{self.url}/predictions", {"input": inputs}, record, event, Accept=accept
        )
        if answer.streamed and not completed:
            raise Failure("stream ended early", "there was no event 'completed'")
        self._finish(parse_object(completed if answer.streamed else answer.text), record)

    def _finish(self, prediction: JSONObject, record: Record) -> None:
        if prediction.get("status") != "succeeded":
            text = str(prediction.get("error") or prediction)
            raise failure(text, str(prediction.get("status") or "malformed answer"))
        told = reported_numbers(prediction)
        record.server = told
        if "input_token_count" in told:
            record.input_tokens = int(told["input_token_count"])
        if "output_token_count" in told:
            record.output_tokens = int(told["output_token_count"])


def reported_numbers(prediction: JSONObject) -> dict[str, float]:
    """Numbers in a prediction's metrics, else in its log, as older servers print them."""
    logs = str(prediction.get("logs") or "")
    found = {
        name: float(match[1]) for name, form in _LOGGED.items() if (match := form.search(logs))
    }
    metrics = prediction.get("metrics") or {}
    return found | {
        name: float(value) for name, value in metrics.items() if type(value) in (int, float)
    }
