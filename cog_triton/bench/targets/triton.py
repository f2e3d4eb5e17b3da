"""Target: Triton's generate_stream, of the ensemble in text or the engine model in ids."""

from __future__ import annotations

import json
import re
from urllib.parse import quote

from cog_triton.bench.prompt_source import Prompt
from cog_triton.bench.request_record import Record
from cog_triton.bench.targets.base import Failure, JSONObject, Target, failure, parse_object

_IDS = re.compile(rb'"output_ids"\s*:\s*(?:\[([^\]]*)\]|-?\d)')
_NO_END = -1


class TritonTarget(Target):
    """Triton model; ``--model tensorrt_llm`` gets token ids, any other text."""

    name = "triton"
    default_port = 8000
    start_hint = "start it with: cog-triton serve --triton-only engine.tar (or name another --url)"

    async def prepare(self) -> None:
        """See `Target.prepare`."""
        self._model = self.options.model or "ensemble"
        self._base = f"{self.url}/v2/models/{quote(self._model, safe='')}"
        answer = await self.get(f"{self._base}/ready")
        if answer.status != 200:
            raise self.unavailable(f"model {self._model!r} is not ready (HTTP {answer.status})")
        described = await self.get(f"{self._base}/config")
        outputs = parse_object(described.text).get("output", []) if described.status == 200 else []
        inputs = parse_object(described.text).get("input", []) if described.status == 200 else []
        self._takes = {str(item.get("name")) for item in inputs}
        self._direct = "input_ids" in self._takes
        self._counted = "num_output_tokens" in {item.get("name") for item in outputs}
        self._path = "generate_stream" if self.options.streamed else "generate"
        if not self._direct and not self._counted:
            self.notes.append(f"{self._model} tells no token counts: an event counts as a token")
        if self._direct and not self.options.tokenizer:
            self.notes.append("Token ids are random ones of 100 to 899, as there is no --tokenizer")

    async def send(self, prompt: Prompt, record: Record) -> None:
        """See `Target.send`."""
        body = self._ids(prompt) if self._direct else self._text(prompt)
        pieces = self._count_ids if self._direct else self._count_events
        last = b""

        def event(data: bytes) -> int:
            nonlocal last
            if b'"error"' in data:
                raise_later.append(failure(_error(data), "error event"))
                return 0
            last = data
            return pieces(data)

        raise_later: list[Failure] = []
        body |= self.options.inputs
        answer = await self.post(f"{self._base}/{self._path}", body, record, event)
        if raise_later:
            raise raise_later[0]
        if not answer.streamed:
            last = b"data: " + answer.text
        told = parse_object(last.removeprefix(b"data:").strip()) if last else {}
        if self._direct:
            record.input_tokens = len(prompt.ids)
            record.output_tokens = record.pieces if answer.streamed else self._count_ids(last)
        else:
            self._counts(told, record)

    def _counts(self, told: JSONObject, record: Record) -> None:
        if self._counted and "num_output_tokens" in told:
            record.output_tokens = int(told["num_output_tokens"])
        elif record.pieces:
            record.output_tokens = record.pieces
        if "num_input_tokens" in told:
            record.input_tokens = int(told["num_input_tokens"])

    def _ids(self, prompt: Prompt) -> JSONObject:
        body: JSONObject = {
            "input_ids": list(prompt.ids),
            "input_lengths": len(prompt.ids),
            "request_output_len": prompt.output_tokens,
            "streaming": self.options.streamed,
        }
        if "exclude_input_in_output" in self._takes:
            body["exclude_input_in_output"] = True
        return body | self._ending()

    def _text(self, prompt: Prompt) -> JSONObject:
        body: JSONObject = {
            "text_input": prompt.text,
            "max_tokens": prompt.output_tokens,
            "bad_words": "",
            "stop_words": "",
            "stream": self.options.streamed,
        }
        if "exclude_input_in_output" in self._takes:
            body["exclude_input_in_output"] = True
        for name in ("return_num_output_tokens", "return_num_input_tokens"):
            if name in self._takes and self._counted:
                body[name] = True
        return body | self._ending()

    def _ending(self) -> JSONObject:
        return {} if self.options.ignore_eos is False else {"end_id": _NO_END}

    def _count_ids(self, data: bytes) -> int:
        found = _IDS.search(data)
        if found is None:
            return 0
        ids = found[1]
        return 1 if ids is None else ids.count(b",") + 1 if ids.strip() else 0

    def _count_events(self, data: bytes) -> int:
        return int(b'"text_output"' in data)


def _error(data: bytes) -> str:
    try:
        return str(json.loads(data.removeprefix(b"data:"))["error"])
    except (ValueError, KeyError, TypeError):
        return data.decode("utf-8", "replace")
