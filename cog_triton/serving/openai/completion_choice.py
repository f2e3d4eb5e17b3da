"""Choice of a completion: its text, behind its prompt if that is echoed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cog_triton.serving.generation import GenerationResult, TextPiece, TokenLogProb
from cog_triton.serving.openai.delta_objects import CompletionLogProbs
from cog_triton.serving.openai.responses import ChoiceBuilder, Envelope, Object, sse_event
from cog_triton.text.detokenize import TokenText


@dataclass(frozen=True, slots=True)
class Echo:
    """Prompt that a completion begins with; `alone` says that it has nothing else."""

    text: str
    first_id: int
    alone: bool


class CompletionChoiceBuilder(ChoiceBuilder):
    """Builder of a choice of a completion."""

    def __init__(
        self,
        envelope: Envelope,
        index: int,
        token_text: TokenText,
        *,
        log_probs: bool = False,
        top_log_probs: int = 0,
        echo: Echo | None = None,
    ) -> None:
        super().__init__(envelope, index, token_text, log_probs=log_probs)
        self._texts: list[str] = []
        self._prompt_log_probs: Sequence[TokenLogProb] = ()
        self._echo = echo
        self._alone = echo is not None and echo.alone
        self._log_prob_builder = CompletionLogProbs(token_text, top=top_log_probs > 0)

    def add(self, piece: TextPiece) -> None:
        """See `ChoiceBuilder.add`."""
        self._prompt_log_probs = piece.prompt or self._prompt_log_probs
        super().add(piece)

    def events(self, piece: TextPiece) -> bytes:
        """See `ChoiceBuilder.events`."""
        if self._echo is None and not self._alone:
            return super().events(piece)
        return b"".join(map(sse_event, self.chunks(piece)))

    def chunks(self, piece: TextPiece) -> list[Object]:
        """See `ChoiceBuilder.chunks`."""
        echoed = self._echo_chunks(piece.prompt)
        if self._alone or not (piece.text or piece.log_probs):
            return echoed
        chunk = self._text_chunk(piece.text)
        chunk["choices"][0]["logprobs"] = self._log_prob_object(piece.log_probs)
        return [*echoed, chunk]

    def end_chunks(self) -> list[Object]:
        """See `ChoiceBuilder.end_chunks`."""
        return self._echo_chunks(())

    def last_chunk(self, result: GenerationResult) -> Object:
        """See `ChoiceBuilder.last_chunk`."""
        return self._chunk({"text": ""}, self._finish_reason(result))

    def _echo_chunks(self, log_probs: Sequence[TokenLogProb]) -> list[Object]:
        """The chunk of the prompt, before anything else."""
        if self._echo is None:
            return []
        echo, self._echo = self._echo, None
        chunk = self._text_chunk(echo.text)
        if self._tells_log_probs:
            found = self._log_prob_builder.build(log_probs, echo.first_id)
            chunk["choices"][0]["logprobs"] = found
        return [chunk]

    def _add_text(self, text: str) -> None:
        self._texts.append(text)

    def _content(self) -> Object:
        texts = [] if self._alone else self._texts
        return {"text": "".join([self._echo.text if self._echo else "", *texts])}

    def _text_chunk(self, text: str) -> Object:
        return self._chunk({"text": text})

    def _finish_reason(self, result: GenerationResult) -> str | None:
        return "length" if self._alone else result.finish_reason

    def _build_log_probs(self, log_probs: Sequence[TokenLogProb]) -> Object:
        if self._echo is None:
            return self._log_prob_builder.build(log_probs)
        own = [] if self._alone else log_probs
        return self._log_prob_builder.build([*self._prompt_log_probs, *own], self._echo.first_id)
