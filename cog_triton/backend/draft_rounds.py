"""Rounds of a drafted request: the draft proposes tokens, the target verifies them.

Only greedy requests of one sequence are drafted: there, what the target would have made does not
depend on how the tokens come.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cog_triton.backend.bls_engine import Engine, EngineCall, EngineRequest
from cog_triton.backend.bls_inputs import Tensors

# What a request must not have to be drafted: its answer would be made of several.
_WHOLE = (
    *("lora_task_id", "prompt_embedding_table", "guided_decoding_guide", "draft_input_ids"),
    *("return_context_logits", "return_generation_logits", "return_perf_metrics"),
    *("return_log_probs", "retention_token_range_starts", "decoder_input_ids", "embedding_bias"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words_list"),
)
# Inputs that the draft gets, too.
_OF_DRAFT = ("end_id", "pad_id", "runtime_top_k", "temperature")
_MIN_TOKENS = ("min_tokens", "min_length")


@dataclass(frozen=True, slots=True)
class Engines:
    """The two engines' models, and how many tokens are proposed at a time."""

    target: Engine
    draft: Engine
    num_draft_tokens: int
    max_input_len: int
    excludes_input: bool


class Generation:
    """One greedy request, in rounds; `accepted` of `proposed` draft tokens were the target's."""

    def __init__(self, engines: Engines, inputs: Tensors) -> None:
        self._engines = engines
        self._inputs = inputs
        self._prompt: list[int] = inputs["input_ids"].ravel().tolist()
        self._most = int(inputs["request_output_len"].flat[0])
        self._end = int(number(inputs, "end_id", -1))
        self._stops = _word_lists(inputs.get("stop_words_list"))
        self._id = f"draft-{uuid.uuid4().hex}"
        self._made: list[int] = []
        self._call: EngineCall | None = None
        self.stopped = False
        self.accepted = self.proposed = 0

    def rounds(self) -> Iterator[list[int]]:
        """The new tokens of each round; raises the coded error of an engine."""
        while not self.stopped and (left := self._most - len(self._made)) > 0:
            # The target adds a token of its own to those that it accepts.
            count = min(self._engines.num_draft_tokens, left - 1)
            if len(self._prompt) + len(self._made) + 2 * count + 1 > self._engines.max_input_len:
                # The text so far would soon be too long a prompt: the target goes on alone.
                yield from filter(None, [self._verify([], left)])
                return
            proposed = self._propose(count) if count else []
            found = self._verify(proposed, len(proposed) + 1)
            same = _common(proposed, found)
            self.proposed += len(proposed)
            self.accepted += same
            self._made += found
            if found:
                yield found
            # One that only repeats what was proposed has ended: else it has one of its own.
            if same == len(found) or found[-1] == self._end or self._at_stop():
                return

    def cancel(self) -> None:
        """End it after the round that runs, which is stopped; from any thread."""
        self.stopped = True
        if (call := self._call) is not None:
            call.cancel()

    def _propose(self, count: int) -> list[int]:
        given = {name: self._inputs[name] for name in _OF_DRAFT if name in self._inputs}
        return self._answer(self._engines.draft, {**given, **self._length(count)})

    def _verify(self, proposed: Sequence[int], count: int) -> list[int]:
        given = {**self._inputs, **self._length(count)}
        for name in _MIN_TOKENS:
            if name in given:
                least = max(0, int(given[name].flat[0]) - len(self._made))
                given[name] = np.array([[least]], np.int32)
        if proposed:
            given["draft_input_ids"] = np.array([proposed], np.int32)
        return self._answer(self._engines.target, given)

    def _length(self, count: int) -> Tensors:
        return {"request_output_len": np.array([[count]], np.int32)}

    def _answer(self, engine: Engine, given: Tensors) -> list[int]:
        """The new tokens of one call of an engine that continues the text so far."""
        ids = [*self._prompt, *self._made]
        inputs = {
            **given,
            "input_ids": np.array([ids], np.int32),
            "input_lengths": np.array([[len(ids)]], np.int32),
            "streaming": np.array([[False]]),
        }
        if self._engines.excludes_input:
            inputs["exclude_input_in_output"] = np.array([[True]])
        self._call = engine.call(EngineRequest(self._id, inputs, ()))
        found: list[int] = []
        for response in self._call:
            found += response.beams[0]
        self._call = None
        if not self._engines.excludes_input and found[: len(ids)] == ids:
            found = found[len(ids) :]
        return found[: int(given["request_output_len"].flat[0])]

    def _at_stop(self) -> bool:
        """Whether a stop word ends what was made, perhaps begun in an earlier round."""
        return any(self._made[-len(word) :] == word for word in self._stops)


def is_drafted(inputs: Mapping[str, Any]) -> bool:
    """Whether a request is greedy, of one sequence, and asks for tokens alone."""
    greedy = number(inputs, "runtime_top_k", 0) == 1 or number(inputs, "temperature", 1) == 0
    single = all(number(inputs, name, 1) == 1 for name in ("beam_width", "num_return_sequences"))
    return greedy and single and not any(is_set(inputs, name) for name in _WHOLE)


def is_set(inputs: Mapping[str, Any], name: str) -> bool:
    tensor = inputs.get(name)
    if tensor is None or not tensor.size:
        return False
    neutral = {"repetition_penalty": 1}.get(name, 0)
    return tensor.dtype == np.object_ or bool((tensor != neutral).any())


def number(inputs: Mapping[str, Any], name: str, default: float) -> float:
    tensor = inputs.get(name)
    return default if tensor is None else float(tensor.flat[0])


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the beginning that both share."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def _word_lists(tensor: Any) -> list[list[int]]:
    """Words of stop_words_list: ids in the first row, their ends in the second."""
    if tensor is None:
        return []
    ids, ends = (row.tolist() for row in tensor.reshape(2, -1))
    ends = [end for end in ends if end > 0]
    return [ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]
