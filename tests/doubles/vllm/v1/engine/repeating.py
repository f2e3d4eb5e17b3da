"""Model of the double: one sequence, which repeats the prompt.

Its next token follows from the tokens before it alone, so that it goes on with its own output.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.outputs import Logprob
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.sampler import sample
from vllm.v1.request import Request


class Sequence:
    """Sequence that repeats the prompt from token `index` on, until an end-of-sequence token.

    A prompt that repeats itself already goes on as it does.
    """

    def __init__(
        self, index: int, request: Request, tokenizer: Any, eos: int, room: int, manager: Any
    ) -> None:
        self.request_id = request.request_id
        self.request, self._manager = request, manager
        self._failed = False
        self._samples = "VLLM_DOUBLE_SAMPLES" in os.environ
        self.params = params = request.sampling_params
        self.tokenizer = tokenizer
        self.eos = eos
        self.most = room if params.max_tokens is None else min(room, params.max_tokens)
        self.tokens = request.output_token_ids
        prompt = request.prompt_token_ids
        structured = params.structured_outputs
        # As in vLLM not of a request that has output, as after a preemption.
        self.prompt_logprobs = None if self.tokens else self.of_prompt(prompt)
        unit = prompt[: _period(prompt)]
        start = (len(prompt) + index) % len(unit)
        self.script = [*unit[start:], *unit[:start]]
        if structured is not None and structured.choice:
            self.script = [*tokenizer.encode(structured.choice[0]).ids, eos]

    def is_ready(self) -> bool:
        """Whether it can make a token, or has failed."""
        try:
            return self._manager.is_ready(self.request)
        except Exception:  # noqa: BLE001 - of its grammar
            self._failed = True
            return True

    def step(self) -> EngineCoreOutput:
        """Generate one token."""
        if self._failed:
            return EngineCoreOutput(self.request_id, [], None, FinishReason.ERROR)
        token = self._next()
        self.request.append_output_token_ids(token)
        if not self._manager.accept_tokens(self.request, [token]):
            return EngineCoreOutput(self.request_id, [], None, FinishReason.ERROR)
        logprobs = None
        if self.params.logprobs is not None:
            logprobs = [self.likeliest(token, -len(self.tokens) / 8, self.params.logprobs)]
        of_prompt, self.prompt_logprobs = self.prompt_logprobs, None
        made = EngineCoreOutput(self.request_id, [token], logprobs, *self._finish(token), of_prompt)
        made.num_cached_tokens = self.request.num_cached_tokens
        return made

    def text(self, token: int) -> str:
        """Text of a token, as vLLM tells it, not the vocabulary's spelling."""
        return str(self.tokenizer.decode([token]))

    def likeliest(self, token: int, logprob: float, count: int) -> dict[int, Logprob]:
        """The token, which is the likeliest, and others up to `count`."""
        return {
            token + place: Logprob(logprob - place, place + 1, self.text(token + place))
            for place in range(max(count, 1))
        }

    def of_prompt(self, ids: list[int]) -> list[dict[int, Logprob] | None] | None:
        """Log probabilities of the prompt's tokens, None for its first; all others are likelier."""
        if (count := self.params.prompt_logprobs) is None:
            return None
        return [
            None,
            *(
                {
                    token: Logprob(-9.0, 99, self.text(token)),
                    **self.likeliest(token + 1, -1.0, count),
                }
                for token in ids[1:]
            ),
        ]

    def _next(self) -> int:
        token = self.script[len(self.tokens) % len(self.script)]
        if self._samples:
            allowed = self._manager.allowed(self.request)
            prompt = self.request.prompt_token_ids
            token = sample(self.params, prompt, self.tokens, token, self.eos, allowed)
        for word in self.params._bad_words_token_ids or []:
            if [*self.tokens, token][-len(word) :] == word:
                token += 1
        return token

    def _finish(self, token: int) -> tuple[FinishReason | None, int | None]:
        if len(self.tokens) > self.params.min_tokens:
            if token == self.eos and not self.params.ignore_eos:
                return FinishReason.STOP, None
            if token in self.params.stop_token_ids:
                return FinishReason.STOP, token
        return (FinishReason.LENGTH if len(self.tokens) >= self.most else None), None


def _period(ids: list[int]) -> int:
    """Number of tokens after which `ids` repeat themselves at least once; all if they do not."""
    sizes = range(1, len(ids) // 2 + 1)
    return next((size for size in sizes if ids[size:] == ids[:-size]), len(ids))
