"""Choice of /v1/messages, the only one: blocks of its content, and the events that tell of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable

from cog_triton.serving.generation import GenerationResult, TextPiece
from cog_triton.serving.openai.choices import EventChoiceBuilder, call_id
from cog_triton.serving.openai.envelope import MessageEnvelope, Object, message_usage
from cog_triton.serving.openai.parsers.answer_parser import AnswerParser
from cog_triton.serving.openai.parsers.call_parser import (
    CallArguments,
    CallStart,
    Content,
    Delta,
    Reasoning,
)
from cog_triton.text.detokenize import TokenText

_BEGUN: Object = {"stop_reason": None, "stop_sequence": None}


class MessageChoiceBuilder(EventChoiceBuilder):
    """Builder of the only answer; of the strings that end a text, the request's own are told."""

    def __init__(
        self,
        envelope: MessageEnvelope,
        token_text: TokenText,
        prompt_tokens: int,
        stops: Collection[str],
        parser: AnswerParser | None = None,
    ) -> None:
        super().__init__(envelope, token_text, prompt_tokens, parser)
        self._message = envelope
        self._stops = stops
        self._blocks = MessageBlocks()

    def first_chunks(self) -> list[Object]:
        begun = self._message.message([], _BEGUN, message_usage(self._prompt_tokens, 0))
        return [{"type": "message_start", "message": begun}, {"type": "ping"}]

    def chunks(self, piece: TextPiece) -> list[Object]:
        return self._blocks.feed(self._parse(piece.text))

    def closing_chunks(self, result: GenerationResult) -> list[Object]:
        events = self._close()
        usage = message_usage(self._prompt_count(result), result.output_token_count)
        last = {"type": "message_delta", "delta": self._end(result), "usage": usage}
        return [*events, last, {"type": "message_stop"}]

    def choice(self, result: GenerationResult) -> Object:
        self._close()
        return {"content": self._blocks.content, "end": self._end(result)}

    def _add_text(self, text: str) -> None:
        self._blocks.feed(self._parse(text))

    def _close(self) -> list[Object]:
        return [*self._blocks.feed(self._held()), *self._blocks.close()]

    def _end(self, result: GenerationResult) -> Object:
        """Why it ended; calls come before a stop string, as they are what the client acts on."""
        if result.finish_reason == "length":
            return {**_BEGUN, "stop_reason": "max_tokens"}
        if self._parser is not None and self._parser.called:
            return {**_BEGUN, "stop_reason": "tool_use"}
        if result.stop_string in self._stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": result.stop_string}
        return {**_BEGUN, "stop_reason": "end_turn"}


class MessageBlocks:
    """Builds `content`; a block is open until one of another kind, or the end, closes it.

    A call whose arguments were cut is in the events alone: they are no JSON object.
    """

    def __init__(self) -> None:
        self.content: list[Object] = []
        self._open: Object | None = None
        self._texts: list[str] = []
        self._begun = 0

    def feed(self, deltas: Iterable[Delta]) -> list[Object]:
        """The events of these deltas."""
        events: list[Object] = []
        for delta in deltas:
            match delta:
                case Content(text) if text:
                    events += self._require({"type": "text", "text": ""})
                    events.append(self._delta("text_delta", "text", text))
                case Reasoning(text):
                    # Anthropic signs what only its own models may be given back.
                    events += self._require({"type": "thinking", "thinking": "", "signature": ""})
                    events.append(self._delta("thinking_delta", "thinking", text))
                case CallStart(_, name):
                    call = {"type": "tool_use", "id": call_id(), "name": name, "input": {}}
                    events += [*self.close(), self._start(call)]
                case CallArguments(_, text):
                    events.append(self._delta("input_json_delta", "partial_json", text))
        return events

    def close(self) -> list[Object]:
        """The events of the end of the open block, if there is one."""
        block, self._open = self._open, None
        if block is None:
            return []
        text, self._texts = "".join(self._texts), []
        events = [self._event("content_block_stop")]
        match block["type"]:
            case "tool_use":
                block["input"] = _arguments(text)
            case "thinking":
                events.insert(0, self._delta("signature_delta", "signature", ""))
                block["thinking"] = text
            case kind:
                block[kind] = text
        if block.get("input", {}) is not None:
            self.content.append(block)
        return events

    def _require(self, block: Object) -> list[Object]:
        if self._open is not None and self._open["type"] == block["type"]:
            return []
        return [*self.close(), self._start(block)]

    def _start(self, block: Object) -> Object:
        self._open = block
        self._begun += 1
        return self._event("content_block_start", content_block={**block})

    def _delta(self, kind: str, name: str, text: str) -> Object:
        self._texts.append(text)
        return self._event("content_block_delta", delta={"type": kind, name: text})

    def _event(self, kind: str, **values: Object) -> Object:
        return {"type": kind, "index": self._begun - 1, **values}


def _arguments(text: str) -> Object | None:
    """The arguments of a call, None if they were cut."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
