"""Target: Replicate's API; a prediction is created, then streamed or polled."""

from __future__ import annotations

import asyncio
import re

from cog_triton.bench.http_client import encode_request, now
from cog_triton.bench.prompt_source import Prompt
from cog_triton.bench.request_record import Record
from cog_triton.bench.targets.base import (
    CountingSink,
    Failure,
    JSONObject,
    Target,
    failure,
    parse_object,
)
from cog_triton.bench.targets.cog import reported_numbers
from cog_triton.errors import InvalidArgument, Unauthorized
from cog_triton.text import sse

_MODEL = re.compile(r"(?:(deployments)/)?([\w.-]+/[\w.-]+)(?::([0-9a-f]+))?")
_ENDED = ("succeeded", "failed", "canceled", "aborted")


class ReplicateTarget(Target):
    """Replicate model: ``--model OWNER/NAME[:VERSION]`` or ``deployments/OWNER/NAME``."""

    name = "replicate"
    default_port = 443
    start_hint = "check --url and REPLICATE_API_TOKEN"

    async def prepare(self) -> None:
        """See `Target.prepare`."""
        options = self.options
        if not options.api_key:
            raise Unauthorized("REPLICATE_API_TOKEN is not set")
        match = _MODEL.fullmatch(options.model or "")
        if match is None or (match[1] and match[3]):
            raise InvalidArgument(
                f"--model={options.model!r}: must be OWNER/NAME, OWNER/NAME:VERSION or"
                " deployments/OWNER/NAME"
            )
        self.headers["Authorization"] = f"Bearer {options.api_key}"
        kind = match[1] or "models"
        described = await self.get(f"{self.url}/v1/{kind}/{match[2]}")
        if described.status == 401:
            raise Unauthorized(f"{self.url}: REPLICATE_API_TOKEN is refused")
        if described.status != 200:
            raise self.unavailable(f"{options.model} answers HTTP {described.status}")
        self._version = match[3]
        path = "predictions" if self._version else f"{kind}/{match[2]}/predictions"
        self._create = f"{self.url}/v1/{path}"
        if options.ignore_eos is None:
            self.notes.append("Answers may end early: --ignore-eos sends min_tokens, too")

    async def send(self, prompt: Prompt, record: Record) -> None:
        """See `Target.send`."""
        options = self.options
        inputs: JSONObject = {"prompt": prompt.text, "max_tokens": prompt.output_tokens}
        if options.ignore_eos:
            inputs["min_tokens"] = prompt.output_tokens
        body: JSONObject = {"input": {**inputs, **options.inputs}, "stream": options.streamed}
        if self._version:
            body["version"] = self._version
        answer = await self.post(self._create, body, record, lambda event: 0)
        record.ended = 0.0
        prediction = parse_object(answer.text)
        stream = prediction["urls"].get("stream") if options.streamed else None
        if stream:
            await self._stream(stream, record)
        elif options.streamed:
            note = "The model does not stream: it is polled, so there is no time to first token"
            if note not in self.notes:
                self.notes.append(note)
        ended = await self._poll(prediction, record)
        if ended["status"] != "succeeded":
            raise failure(str(ended.get("error") or ended["status"]), ended["status"])
        record.server = reported_numbers(ended)
        counts = record.server
        if "input_token_count" in counts:
            record.input_tokens = int(counts["input_token_count"])
        tokens = counts.get("output_token_count", record.pieces)
        record.output_tokens = int(tokens) or None

    async def _stream(self, url: str, record: Record) -> None:
        wrong: list[Failure] = []

        def event(data: bytes) -> int:
            kind = sse.event_name(data)
            if kind == b"error":
                wrong.append(
                    failure(sse.event_data(data).decode("utf-8", "replace"), "error event")
                )
            return int(kind == b"output")

        answer = CountingSink(record, event)
        head = {**self.headers, "Accept": "text/event-stream", "Cache-Control": "no-store"}
        await self.client.send(*encode_request("GET", url, head), answer)
        answer.require_ok()
        record.ended = answer.at
        if wrong:
            raise wrong[0]

    async def _poll(self, prediction: JSONObject, record: Record) -> JSONObject:
        while prediction["status"] not in _ENDED:
            answer = await self.client.fetch("GET", prediction["urls"]["get"], self.headers)
            if answer.status != 200:
                raise failure(answer.text.decode("utf-8", "replace"), f"HTTP {answer.status}")
            prediction = parse_object(answer.text)
            if prediction["status"] not in _ENDED:
                await asyncio.sleep(self.options.poll_interval)
        record.ended = record.ended or now()
        return prediction
