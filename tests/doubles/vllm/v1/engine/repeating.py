"""Model of the double: one sequence, which repeats the prompt."""

from __future__ import annotations

from typing import Any

from vllm.outputs import CompletionOutput, Logprob
from vllm.sampling_params import SamplingParams


class Sequence:
    """Sequence that repeats the prompt from token `index` on, until an end-of-sequence token."""

    def __init__(
        self, index: int, prompt: list[int], params: SamplingParams, tokenizer: Any, eos: int,
        room: int,
    ) -> None:  # fmt: skip
        self.index = index
        self.prompt = prompt
        self.params = params
        self.tokenizer = tokenizer
        self.eos = eos
        self.room = room
        self.tokens: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        structured = params.structured_outputs
        self.script = list(prompt[index:]) + list(prompt[:index])
        if structured is not None and structured.choice:
            self.script = [*tokenizer.encode(structured.choice[0]).ids, eos]

    def step(self, aborted: bool) -> CompletionOutput:
        """Generate one token; returns it as a delta."""
        if aborted:
            self.finish_reason = "abort"
            return self._output([], "")
        token = self._next()
        self.tokens.append(token)
        old, self.text = self.text, self._decoded()
        self._finish(token)
        if self.finish_reason is None and self.text.endswith("\ufffd"):
            self.text = old
        return self._output([token], self.text[len(old) :])

    def whole(self) -> CompletionOutput:
        """All output so far."""
        return self._output(self.tokens, self.text)

    def _next(self) -> int:
        token = self.script[len(self.tokens) % len(self.script)]
        for word in self.params._bad_words_token_ids or []:
            if [*self.tokens, token][-len(word) :] == word:
                token += 1
        return token

    def _decoded(self) -> str:
        if not self.params.detokenize:
            return ""
        return str(self.tokenizer.decode(self.tokens, skip_special_tokens=True))

    def _finish(self, token: int) -> None:
        params, count = self.params, len(self.tokens)
        most = self.room if params.max_tokens is None else min(self.room, params.max_tokens)
        stops = [stop for stop in params.stop if stop in self.text]
        if count > params.min_tokens:
            if token == self.eos and not params.ignore_eos:
                self.finish_reason = "stop"
            elif token in params.stop_token_ids:
                self.finish_reason, self.stop_reason = "stop", token
            elif stops:
                self.finish_reason, self.stop_reason = "stop", stops[0]
                self.text = self.text[: self.text.index(stops[0])]
        if self.finish_reason is None and count >= most:
            self.finish_reason = "length"

    def _output(self, tokens: list[int], text: str) -> CompletionOutput:
        wanted = self.params.logprobs is not None
        first = len(self.tokens) - len(tokens)
        logprobs = [
            {token: Logprob(-(first + place + 1) / 8, 1, self.tokenizer.id_to_token(token))}
            for place, token in enumerate(tokens)
        ]
        total = sum(-(place + 1) / 8 for place in range(len(self.tokens)))
        return CompletionOutput(
            self.index, text, list(tokens), total if wanted else None,
            logprobs if wanted else None, None, self.finish_reason, self.stop_reason,
        )  # fmt: skip
