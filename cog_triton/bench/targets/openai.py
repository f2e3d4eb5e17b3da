"""Target: OpenAI's API, chats or completions, with usage at the end of streams."""

from __future__ import annotations

import re

from cog_triton.bench.http_client import TransportError
from cog_triton.bench.options import API
from cog_triton.bench.prompt_source import Prompt
from cog_triton.bench.request_record import Record
from cog_triton.bench.targets.base import Failure, JSONObject, Target, failure, parse_object
from cog_triton.errors import InvalidArgument, Unauthorized
from cog_triton.text import sse

# Quotes of the text itself are escaped in JSON, so these are keys.
_TEXT = re.compile(rb'"(?:content|text|reasoning_content|reasoning)"\s*:\s*"(?!")')
_ERROR = re.compile(rb'"error"\s*:\s*[{"]')
_USAGE = re.compile(rb'"usage"\s*:\s*\{')


class OpenAITarget(Target):
    """OpenAI-compatible server; base URLs with and without ``/v1`` are the same."""

    name = "openai"
    default_port = 8080
    start_hint = "start it with: cog-triton serve engine.tar (or name another --url)"

    async def prepare(self) -> None:
        """See `Target.prepare`."""
        self.url = self.url.removesuffix("/v1")
        if self.options.api_key:
            self.headers["Authorization"] = f"Bearer {self.options.api_key}"
        answer = await self.get(f"{self.url}/v1/models")
        if answer.status == 401:
            raise Unauthorized(f"{self.url}/v1/models: set OPENAI_API_KEY")
        if answer.status != 200:
            raise self.unavailable(f"/v1/models answers HTTP {answer.status}")
        names = [str(model["id"]) for model in parse_object(answer.text).get("data", [])]
        wanted = self.options.model
        if not wanted and len(names) != 1:
            raise InvalidArgument(f"--model: name one of the server's: {', '.join(names[:20])}")
        self._model = wanted or names[0]
        self._ignore_eos = self.options.ignore_eos
        if self._ignore_eos is None:
            self._ignore_eos = await self._has_ignore_eos()
            if not self._ignore_eos:
                self.notes.append(
                    "The server does not say that it takes ignore_eos: answers may end early"
                    " (--ignore-eos sends it anyway)"
                )

    async def _has_ignore_eos(self) -> bool:
        try:
            described = await self.client.fetch("GET", f"{self.url}/openapi.json", self.headers)
        except TransportError:
            return False
        return described.status == 200 and b'"ignore_eos"' in described.text

    async def send(self, prompt: Prompt, record: Record) -> None:
        """See `Target.send`."""
        chat = self.options.api is API.CHAT
        body: JSONObject = {"model": self._model, "max_tokens": prompt.output_tokens}
        if chat:
            body["messages"] = [{"role": "user", "content": prompt.text}]
        else:
            body["prompt"] = prompt.text
        if self._ignore_eos:
            body["ignore_eos"] = True
        if self.options.streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        ends: list[bytes] = []
        wrong: list[Failure] = []

        def event(data: bytes) -> int:
            if _ERROR.search(data):
                wrong.append(failure(data.decode("utf-8", "replace"), "error event"))
            if _USAGE.search(data):
                ends.append(sse.event_data(data))
            elif data == b"data: [DONE]":
                ends.append(b"")
            return int(_TEXT.search(data) is not None)

        path = "chat/completions" if chat else "completions"
        answer = await self.post(
            f"{self.url}/v1/{path}", {**body, **self.options.inputs}, record, event
        )
        if wrong:
            raise wrong[0]
        if answer.streamed and not ends:
            raise Failure("stream ended early", "there was neither usage nor [DONE]")
        last = next(filter(None, reversed(ends)), b"") if answer.streamed else answer.text
        usage = parse_object(last).get("usage") if last else None
        if usage:
            record.input_tokens = int(usage["prompt_tokens"])
            record.output_tokens = int(usage["completion_tokens"])
        elif answer.streamed:
            record.output_tokens = record.pieces
            note = "The server sends no usage: an event with text counts as a token"
            if note not in self.notes:
                self.notes.append(note)
