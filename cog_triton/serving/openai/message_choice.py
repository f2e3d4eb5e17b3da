"""Choice of /v1/messages, the only one: blocks of its content, and the events that tell of them."""

from __future__ import annotations

import json
from collections.abc import Collection

from cog_triton.serving.generation import GenerationResult, TextPiece
from cog_triton.serving.openai.answer_items import AnswerItems, EventChoiceBuilder, Kind
from cog_triton.serving.openai.choices import call_id
from cog_triton.serving.openai.envelope import MessageEnvelope, Object
from cog_triton.serving.openai.parsers.answer_parser import AnswerParser
from cog_triton.text.detokenize import TokenText

_BEGUN: Object = dict.fromkeys(("stop_reason", "stop_sequence", "stop_details", "container"))
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


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

    def first_chunks(self, result: GenerationResult) -> list[Object]:
        begun = self._message.message([], _BEGUN, self._usage(result, begun=True))
        return [{"type": "message_start", "message": begun}, {"type": "ping"}]

    def chunks(self, piece: TextPiece) -> list[Object]:
        return self._blocks.feed(self._parse(piece.text))

    def closing_chunks(self, result: GenerationResult) -> list[Object]:
        events = self._close()
        usage = self._usage(result).of_message()
        last = {"type": "message_delta", "delta": self._end(result), "usage": usage}
        return [*events, last, {"type": "message_stop"}]

    def choice(self, result: GenerationResult) -> Object:
        self._close()
        return {"content": self._blocks.output, "end": self._end(result)}

    def _add_text(self, text: str) -> None:
        self._blocks.feed(self._parse(text))

    def _close(self) -> list[Object]:
        return [*self._blocks.feed(self._held()), *self._blocks.close()]

    def _end(self, result: GenerationResult) -> Object:
        """Why it ended; calls come before a stop string, as they are what the client acts on."""
        if self._finish_reason(result) == "length":
            return {**_BEGUN, "stop_reason": "max_tokens"}
        if self._parser is not None and self._parser.called:
            return {**_BEGUN, "stop_reason": "tool_use"}
        if result.stop_string in self._stops:
            stopped = {"stop_reason": "stop_sequence", "stop_sequence": result.stop_string}
            return {**_BEGUN, **stopped}
        return {**_BEGUN, "stop_reason": "end_turn"}


class MessageBlocks(AnswerItems):
    """Builds the blocks of a message's content.

    A call whose arguments were cut is in the events alone: they are no JSON object.
    """

    _begun = 0

    def _start(self, kind: Kind, name: str) -> list[Object]:
        match kind:
            case "text":
                block: Object = {"type": "text", "text": "", "citations": []}
            case "reasoning":  # Anthropic signs what only its own models may be given back
                block = {"type": "thinking", "thinking": "", "signature": ""}
            case "call":
                block = {"type": "tool_use", "id": call_id(), "name": name, "input": {}}
                block["caller"] = {"type": "direct"}
        self._open = block
        self._begun += 1
        return [self._event("content_block_start", content_block={**block})]

    def _delta(self, text: str) -> Object:
        kind, name = _DELTAS[self._open["type"]]
        return self._event("content_block_delta", delta={"type": kind, name: text})

    def _end(self, kind: Kind, text: str, status: str) -> list[Object]:
        block, events = self._open, [self._event("content_block_stop")]
        if kind == "call":
            block["input"] = _arguments(text)
        else:
            block[block["type"]] = text
        if kind == "reasoning":
            signed: Object = {"type": "signature_delta", "signature": ""}
            events.insert(0, self._event("content_block_delta", delta=signed))
        if block.get("input", {}) is not None:
            self.output.append(block)
        return events

    def _event(self, kind: str, **values: Object) -> Object:
        return {"type": kind, "index": self._begun - 1, **values}


def _arguments(text: str) -> Object | None:
    """The arguments of a call, None if they were cut."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
