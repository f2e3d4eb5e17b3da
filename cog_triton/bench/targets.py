"""Benchmark targets: send a request to a kind of server, count its output, class its failure."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar
from urllib.parse import quote

from cog_triton import errors
from cog_triton.bench.http_client import (
    BufferedResponse,
    Client,
    TransportError,
    encode_request,
    now,
    split_url,
)
from cog_triton.bench.options import Options, Prompt, TargetName
from cog_triton.bench.request_record import OK, Record
from cog_triton.text import sse

JSONObject = dict[str, Any]
_LENGTHS = ("n_output_tokens", "max_tokens", "max_new_tokens")
_LOGGED = {
    "tokens_per_second": re.compile(r"Serverside tokens per second: ([\d.]+)"),
    "predict_time": re.compile(r"Serverside execution time: ([\d.]+)"),
    "time_to_first_token": re.compile(r"Serverside time to first token: ([\d.]+)"),
    "output_token_count": re.compile(r"Tokens processed: (\d+)"),
}
# Quotes of the text itself are escaped in JSON, so these are keys.
_TEXT = re.compile(rb'"(?:content|text|reasoning_content|reasoning)"\s*:\s*"(?!")')
_ERROR = re.compile(rb'"error"\s*:\s*[{"]')
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_IDS = re.compile(rb'"output_ids"\s*:\s*(?:\[([^\]]*)\]|-?\d)')


class Failure(Exception):
    """Failed request with an answer; `code` is its failure class."""

    def __init__(self, code: str, detail: str) -> None:
        self.code = code
        super().__init__(detail)


def failure(text: str | bytes, otherwise: str) -> Failure:
    """Failure of an error text: its code, if the text has one, else `otherwise`."""
    said = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    coded = errors.from_text(said)
    return Failure(coded.code if coded else otherwise, said)


class CountingSink(BufferedResponse):
    """Response sink: counts the pieces of an event stream, and buffers any other body."""

    def __init__(self, record: Record, event: Callable[[bytes], int | Failure]) -> None:
        """`event` gets every event of a stream; returns its number of pieces, or a failure."""
        super().__init__()
        self.wrong: Failure | None = None
        self.streamed = False
        self.at = 0.0
        self._record = record
        self._event = event
        self._splitter = sse.EventSplitter()

    def begin(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        super().begin(status, headers)
        kind = headers.get(b"content-type", b"")
        self.streamed = status < 300 and kind.startswith(b"text/event-stream")

    def body(self, data: bytes, at: float) -> None:
        self.at = at
        if not self.streamed:
            self.text += data
            return
        pieces = 0
        for event in self._splitter.feed(data):
            found = self._event(event)
            if isinstance(found, Failure):
                self.wrong = self.wrong or found
            else:
                pieces += found
        if pieces:
            self._record.output(at, pieces)


class Target(ABC):
    """One server to measure; `notes` go to the report."""

    start_hint: ClassVar[str] = "cog-triton serve engine.tar"

    def __init__(self, options: Options, client: Client) -> None:
        split_url(options.url)
        self.options = options
        self.client = client
        self.url = options.url.rstrip("/")
        self.notes: list[str] = []
        self.headers: dict[str, str] = {"User-Agent": "cog-triton-bench", "Accept": "*/*"}

    @abstractmethod
    async def prepare(self) -> None:
        """Find the server and the inputs it accepts; raises E1400 if absent, E1005 for options.

        Nothing is generated.
        """

    @abstractmethod
    async def send(self, prompt: Prompt, record: Record) -> None:
        """Send a request and fill `record` with its answer; raises Failure or TransportError."""

    async def measure(self, prompt: Prompt, record: Record) -> None:
        """Send a request, with times and any failure in `record`; raises only cancellation."""
        record.wanted_tokens = prompt.output_tokens
        record.sent = now()
        try:
            await self.send(prompt, record)
            record.status = OK
        except Failure as error:
            record.fail(error.code, str(error))
        except TransportError as error:
            record.fail(error.kind, str(error))
        except (ValueError, KeyError, TypeError) as error:
            record.fail("malformed answer", f"{type(error).__name__}: {error}")
        finally:
            if not record.ended:
                record.ended = now()

    def unavailable(self, detail: str) -> errors.TargetUnavailable:
        """E1400, with a hint what to start."""
        hint = f"start it with: {self.start_hint} (or name another --url)"
        return errors.TargetUnavailable(f"{self.options.target} at {self.url}: {detail}; {hint}")

    async def get(self, url: str) -> BufferedResponse:
        """GET `url`; raises E1400 if nothing answers."""
        try:
            return await self.client.fetch("GET", url, self.headers)
        except TransportError as error:
            raise self.unavailable(f"{error.kind}: {error}") from error

    async def post(
        self, url: str, body: JSONObject, record: Record, event: Callable[[bytes], int | Failure]
    ) -> CountingSink:
        """POST `body` as JSON and count the answer's pieces; raises Failure unless it succeeds."""
        answer = CountingSink(record, event)
        encoded = json.dumps(body).encode()
        await self.client.send(*encode_request("POST", url, self.headers, encoded), answer)
        record.ended = answer.at or now()
        if not 200 <= answer.status < 300:
            raise failure(answer.text, f"HTTP {answer.status}")
        if answer.wrong:
            raise answer.wrong
        return answer

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)


def parse_object(text: bytes) -> JSONObject:
    """Parse a JSON object; raises Failure."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise Failure("malformed answer", f"not a JSON object: {text[:200]!r}")
    return value


class CogTarget(Target):
    """Cog's /predictions of any predictor with a prompt; streamed if the server can."""

    async def prepare(self) -> None:
        answer = await self.get(f"{self.url}/openapi.json")
        paths: Mapping[str, Any] = {}
        known: Mapping[str, Any] = {}
        if answer.status == 200:
            try:
                document = json.loads(answer.text)
                paths, schemas = document["paths"], document["components"]["schemas"]
                known = schemas["Input"]["properties"]
                post = paths["/predictions"]["post"]
            except (ValueError, TypeError, KeyError) as error:
                raise self.unavailable(f"{self.url}/openapi.json is not Cog's") from error
        health = await self.get(f"{self.url}/health-check")
        status = parse_object(health.text).get("status") if health.status == 200 else None
        if status not in (None, "READY", "BUSY"):
            raise self.unavailable(f"its /health-check says {status}")
        streamed = self.options.streamed
        if streamed and not (paths and post.get("x-cog-streaming")):
            streamed = False
            self.note("The server does not stream (no x-cog-streaming): answers come whole")
        self.headers["Accept"] = "text/event-stream" if streamed else "application/json"
        self._length = next((name for name in _LENGTHS if name in known), "max_tokens")
        self._fixed = self._inputs(known)

    def _inputs(self, known: Mapping[str, Any]) -> JSONObject:
        """Inputs that all requests share; raises E1005 for those that the server lacks."""
        inputs: JSONObject = {}
        if "output_method" in known:
            inputs["output_method"] = self.options.output_method.value
        if self.options.tps is not None:
            if "tps" in known:
                inputs["tps"] = self.options.tps
            else:
                self.note("--tps is not sent: the server has no such input")
        self._shortest = "min_tokens" in known and self._length != "n_output_tokens"
        unknown = [name for name in self.options.inputs if known and name not in known]
        if unknown:
            raise errors.InvalidArgument(
                f"--input {unknown[0]}: the server has no such input; it has {', '.join(known)}"
            )
        return {**inputs, **self.options.inputs}

    async def send(self, prompt: Prompt, record: Record) -> None:
        count = prompt.output_tokens
        inputs: JSONObject = {"prompt": prompt.text, self._length: count, **self._fixed}
        if self._shortest:
            inputs.setdefault("min_tokens", count)
        completed = b""

        def event(data: bytes) -> int:
            nonlocal completed
            if data.startswith(b"event: output"):
                return 1
            if sse.event_name(data) == b"completed":
                completed = sse.event_data(data)
            return int(sse.event_name(data) == b"output")

        answer = await self.post(f"{self.url}/predictions", {"input": inputs}, record, event)
        if answer.streamed and not completed:
            raise Failure("stream ended early", "there was no event 'completed'")
        prediction = parse_object(completed if answer.streamed else answer.text)
        if prediction.get("status") != "succeeded":
            text = str(prediction.get("error") or prediction)
            raise failure(text, str(prediction.get("status") or "malformed answer"))
        record.server = said = reported_numbers(prediction)
        if "input_token_count" in said:
            record.input_tokens = int(said["input_token_count"])
        if "output_token_count" in said:
            record.output_tokens = int(said["output_token_count"])


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


class OpenAITarget(Target):
    """OpenAI's chat completions; base URLs with and without ``/v1`` are the same."""

    async def prepare(self) -> None:
        self.url = self.url.removesuffix("/v1")
        if self.options.api_key:
            self.headers["Authorization"] = f"Bearer {self.options.api_key}"
        answer = await self.get(f"{self.url}/v1/models")
        if answer.status == 401:
            raise errors.Unauthorized(f"{self.url}/v1/models: set OPENAI_API_KEY")
        if answer.status != 200:
            raise self.unavailable(f"/v1/models answers HTTP {answer.status}")
        names = [str(model["id"]) for model in parse_object(answer.text).get("data", [])]
        if not self.options.model and len(names) != 1:
            listed = ", ".join(names[:20])
            raise errors.InvalidArgument(f"--model: name one of the server's: {listed}")
        self._fixed: JSONObject = {"model": self.options.model or names[0]}
        described = await self.get(f"{self.url}/openapi.json")
        if described.status == 200 and b'"ignore_eos"' in described.text:
            self._fixed["ignore_eos"] = True
        else:
            self.note(
                "The server does not say that it takes ignore_eos: answers may end early"
                " (--input ignore_eos=true sends it anyway)"
            )
        if self.options.streamed:
            self._fixed |= {"stream": True, "stream_options": {"include_usage": True}}
        self._fixed |= self.options.inputs

    async def send(self, prompt: Prompt, record: Record) -> None:
        messages = [{"role": "user", "content": prompt.text}]
        body = {"messages": messages, "max_tokens": prompt.output_tokens, **self._fixed}
        ends: list[bytes] = []

        def event(data: bytes) -> int | Failure:
            if _ERROR.search(data):
                return failure(data, "error event")
            if _USAGE.search(data):
                ends.append(sse.event_data(data))
            elif data == b"data: [DONE]":
                ends.append(b"")
            return int(_TEXT.search(data) is not None)

        answer = await self.post(f"{self.url}/v1/chat/completions", body, record, event)
        if answer.streamed and not ends:
            raise Failure("stream ended early", "there was neither usage nor [DONE]")
        last = next(filter(None, reversed(ends)), b"") if answer.streamed else answer.text
        usage = parse_object(last).get("usage") if last else None
        if usage:
            record.input_tokens = int(usage["prompt_tokens"])
            record.output_tokens = int(usage["completion_tokens"])
        elif answer.streamed:
            record.output_tokens = record.pieces
            self.note("The server sends no usage: an event with text counts as a token")


class TritonTarget(Target):
    """Triton's generate_stream; ``--model tensorrt_llm`` gets token ids, any other text."""

    start_hint = "cog-triton serve --triton-only engine.tar"

    async def prepare(self) -> None:
        model = self.options.model or "ensemble"
        base = f"{self.url}/v2/models/{quote(model, safe='')}"
        answer = await self.get(f"{base}/ready")
        if answer.status != 200:
            raise self.unavailable(f"model {model!r} is not ready (HTTP {answer.status})")
        described = await self.get(f"{base}/config")
        config = parse_object(described.text) if described.status == 200 else {}
        takes = {str(item.get("name")) for item in config.get("input", [])}
        self._direct = "input_ids" in takes
        self._counted = "num_output_tokens" in {
            item.get("name") for item in config.get("output", [])
        }
        self._url = f"{base}/generate{'_stream' * self.options.streamed}"
        streaming = "streaming" if self._direct else "stream"
        # No end: all of the tokens that were asked for.
        self._fixed: JSONObject = {streaming: self.options.streamed, "end_id": -1}
        if "exclude_input_in_output" in takes:
            self._fixed["exclude_input_in_output"] = True
        if self._direct:
            self.note("Token ids are random ones of 100 to 899")
        else:
            self._fixed |= {"bad_words": "", "stop_words": ""}
            wanted = {"return_num_output_tokens", "return_num_input_tokens"} & takes
            self._fixed |= dict.fromkeys(wanted if self._counted else (), True)
            if not self._counted:
                self.note(f"{model} has no token counts: an event counts as a token")
        self._fixed |= self.options.inputs

    async def send(self, prompt: Prompt, record: Record) -> None:
        count = prompt.output_tokens
        body: JSONObject = {"text_input": prompt.text, "max_tokens": count}
        if self._direct:
            ids = {"input_ids": list(prompt.ids), "input_lengths": len(prompt.ids)}
            body = {**ids, "request_output_len": count}
        last = b""

        def event(data: bytes) -> int | Failure:
            nonlocal last
            if b'"error"' in data:
                return failure(data, "error event")
            last = data
            return _count_ids(data) if self._direct else int(b'"text_output"' in data)

        answer = await self.post(self._url, {**body, **self._fixed}, record, event)
        last = last if answer.streamed else answer.text
        said = parse_object(last.removeprefix(b"data:").strip()) if last else {}
        if self._direct:
            record.input_tokens = len(prompt.ids)
            record.output_tokens = record.pieces if answer.streamed else _count_ids(last)
            return
        if self._counted and "num_output_tokens" in said:
            record.output_tokens = int(said["num_output_tokens"])
        elif record.pieces:
            record.output_tokens = record.pieces
        if "num_input_tokens" in said:
            record.input_tokens = int(said["num_input_tokens"])


def _count_ids(data: bytes) -> int:
    found = _IDS.search(data)
    if found is None:
        return 0
    ids = found[1]
    return 1 if ids is None else ids.count(b",") + 1 if ids.strip() else 0


KINDS: dict[TargetName, type[Target]] = {
    TargetName.COG: CogTarget,
    TargetName.TRITON: TritonTarget,
    TargetName.OPENAI: OpenAITarget,
}
