"""Choice of a chat: its message, or the deltas of its chunks."""

from __future__ import annotations

from collections.abc import Sequence

from cog_triton.serving.generation import GenerationResult, TextPiece, TokenLogProb
from cog_triton.serving.openai.delta_objects import chat_log_probs, delta_object, message_object
from cog_triton.serving.openai.parsers.answer_parser import AnswerParser
from cog_triton.serving.openai.parsers.deltas import Content, Delta, join
from cog_triton.serving.openai.responses import ChoiceBuilder, Envelope, Object, sse_event
from cog_triton.text.detokenize import TokenText


class ChatChoiceBuilder(ChoiceBuilder):
    """Builder of a choice of a chat, with a parser if its reasoning or tool calls need one."""

    def __init__(
        self,
        envelope: Envelope,
        index: int,
        token_text: TokenText,
        *,
        log_probs: bool = False,
        parser: AnswerParser | None = None,
    ) -> None:
        super().__init__(envelope, index, token_text, log_probs=log_probs)
        self._parser = parser
        self._deltas: list[Delta] = []

    def first_chunks(self) -> list[Object]:
        """The chunk with the role."""
        return [self._chunk({"delta": {"role": "assistant", "content": ""}})]

    def chunks(self, piece: TextPiece) -> list[Object]:
        """See `ChoiceBuilder.chunks`; log probabilities are in the first one."""
        made = [self._delta(delta) for delta in self._parse(piece.text)]
        if self._tells_log_probs:
            made = made or [self._chunk({"delta": {}})]
            made[0]["choices"][0]["logprobs"] = self._log_prob_object(piece.log_probs)
        return made

    def end_chunks(self) -> list[Object]:
        """See `ChoiceBuilder.end_chunks`."""
        return [self._delta(delta) for delta in (self._parser.finish() if self._parser else [])]

    def last_chunk(self, result: GenerationResult) -> Object:
        """See `ChoiceBuilder.last_chunk`."""
        return self._chunk({"delta": {}}, self._finish_reason(result))

    def _parse(self, text: str) -> Sequence[Delta]:
        return self._parser.feed(text) if self._parser else [Content(text)]

    def _add_text(self, text: str) -> None:
        self._deltas += self._parse(text)

    def _content(self) -> Object:
        held = self._parser.finish() if self._parser else []
        return {"message": message_object(join([*self._deltas, *held]))}

    def _text_events(self, text: str) -> bytes:
        if self._parser is None:
            return self._text_event(text)
        return b"".join(
            self._text_event(delta.text)
            if isinstance(delta, Content)
            else sse_event(self._delta(delta))
            for delta in self._parser.feed(text)
        )

    def _text_chunk(self, text: str) -> Object:
        return self._delta(Content(text))

    def _delta(self, delta: Delta) -> Object:
        return self._chunk({"delta": delta_object(delta)})

    def _finish_reason(self, result: GenerationResult) -> str | None:
        reason = result.finish_reason
        return self._parser.finish_reason(reason) if self._parser else reason

    def _build_log_probs(self, log_probs: Sequence[TokenLogProb]) -> Object:
        return chat_log_probs(self._token_text, log_probs)
