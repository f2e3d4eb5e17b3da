"""Answers: the tensors of responses, made from the events of an engine request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton.backend.text_inputs import Prompt, Tensors
from cog_triton.engines.request import EngineRequest, TokenEvent
from cog_triton.errors import CogTritonError
from cog_triton.text.stop_strings import TextStream
from cog_triton.text.tokenizer import EngineTokenizer

_GROWING = ("output_log_probs", "output_ids")


class Part(ABC):
    """One engine request of a client's request, and the responses that its events become."""

    tokens = 0
    """Output tokens of the last event."""
    prompt_tokens = 0
    outcome: str | None = None
    """Why it ended, where the last event does not say it."""
    finished = False
    """Whether the engine can be stopped, as the answer is complete."""

    def __init__(self, request: Any, prompt: Sequence[int] | None = None) -> None:
        """`prompt` distinguishes prompts for the choice of a replica: see `EngineClient.submit`."""
        self.request = request
        self.prompt = prompt

    @abstractmethod
    def feed(self, event: Any) -> list[Tensors]:
        """The responses to send now."""

    def finish(self) -> list[Tensors]:
        """The responses that are left to send in the end."""
        return []


class TokenOutputs:
    """Outputs of ``tensorrt_llm`` beside its tokens, counted over the events of a request."""

    def __init__(self, request: EngineRequest) -> None:
        self._request = request
        self._tokens = 0
        self._log_prob = 0.0

    def of(self, event: TokenEvent) -> Tensors:
        """Those that the request asks for."""
        self._tokens += len(event.token_ids)
        self._log_prob += sum(event.log_probs)
        found: Tensors = {}
        if self._request.return_log_probs:
            found["output_log_probs"] = np.array([[event.log_probs]], np.float32)
            found["cum_log_probs"] = np.array([[self._log_prob]], np.float32)
        if self._request.return_num_input_tokens:
            found["num_input_tokens"] = np.array([[len(self._request.input_ids)]], np.int32)
        if self._request.return_num_output_tokens:
            found["num_output_tokens"] = np.array([[self._tokens]], np.int32)
        return found


@dataclass(frozen=True, slots=True)
class EngineResponse:
    """New token ids of each beam, and the requested outputs that came with them.

    The last one of a request has a `finish` or an `error`.
    """

    beams: list[list[int]]
    outputs: Tensors
    sequence_index: int = 0
    finish: str | None = None
    error: CogTritonError | None = None


class TextResponses:
    """Text of one sequence, streamed or whole, with the engine's other outputs beside it.

    Text is cut at stop strings and between characters. Other outputs wait for the next text: of
    each the latest is sent, of output_log_probs and output_ids all. `accumulate` repeats all text
    so far in every streamed response; `prompt_ids` precede text that is not streamed.
    """

    def __init__(
        self,
        tokenizer: EngineTokenizer,
        stops: Sequence[str],
        *,
        min_tokens: int = 0,
        streaming: bool = True,
        accumulate: bool = False,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._stream = TextStream(tokenizer, stops, min_tokens=min_tokens)
        self._streaming = streaming
        self._cumulative = accumulate or not streaming
        self._text = self._stream.echo(prompt_ids)
        self._sent = 0
        self._outputs: Tensors = {}

    @property
    def finished(self) -> bool:
        """Whether a stop string has matched, so that the engine can be stopped."""
        return self._stream.stopped

    def feed(self, token_ids: Sequence[int], outputs: Mapping[str, npt.NDArray[Any]]) -> Tensors:
        """Add an engine response; returns the response to send now, empty if there is none yet."""
        for name, tensor in outputs.items():
            if name in _GROWING and name in self._outputs:
                tensor = np.concatenate([self._outputs[name], tensor], axis=-1)
            self._outputs[name] = tensor
        self._text += self._stream.feed(token_ids)
        return self._response() if self._streaming and len(self._text) > self._sent else {}

    def finish(self) -> Tensors:
        """The last response; empty if everything was streamed before."""
        self._text += self._stream.finish()
        unsent = len(self._text) > self._sent or self._outputs
        return self._response() if unsent or not self._streaming else {}

    def _response(self) -> Tensors:
        response = {"text_output": _texts([self._text]), **self._outputs}
        self._outputs = {}
        if self._cumulative:
            self._sent = len(self._text)
        else:
            self._text = ""
        return response


class TextPart(Part):
    """A prompt's answer as text: of one sequence, of several by turns, or of all beams at once.

    Each response has the indices of its prompt in the batch and of its sequence, as far as
    `outputs`, the names that the client asked for, has them.
    """

    def __init__(
        self,
        request: Any,
        tokenizer: EngineTokenizer,
        prompt: Prompt,
        outputs: Collection[str],
        *,
        batch_index: int = 0,
        accumulate: bool = False,
    ) -> None:
        super().__init__(request)
        self.prompt_tokens = len(prompt.ids)
        self._prompt = prompt
        self._outputs = outputs
        self._batch_index = batch_index
        self._others = TokenOutputs(request) if isinstance(request, EngineRequest) else None
        self._new: Callable[[], TextResponses] = lambda: TextResponses(
            tokenizer,
            prompt.stop_words,
            min_tokens=prompt.min_tokens,
            streaming=prompt.streaming,
            accumulate=accumulate,
            prompt_ids=prompt.ids if prompt.echo else (),
        )
        self._texts: dict[int, TextResponses] = {}

    def feed(self, event: TokenEvent | EngineResponse) -> list[Tensors]:
        response = self._response(event) if isinstance(event, TokenEvent) else event
        rows = [self._prompt.without_input(row) for row in response.beams]
        self.tokens = sum(map(len, rows))
        if not rows:
            return []
        outputs = dict(response.outputs)
        if self._prompt.beams > 1:
            return [self._indexed(0, self._beams(rows, outputs))]
        index = response.sequence_index
        if index not in self._texts:
            self._texts[index] = self._new()
            outputs |= self._ids(rows)
        elif "output_ids" in self._outputs:
            outputs["output_ids"] = padded(rows)
        text = self._texts[index]
        if text.finished:
            return []
        sent = text.feed(rows[0], outputs)
        if len(self._texts) >= self._prompt.sequences:
            self.finished = all(text.finished for text in self._texts.values())
            self.outcome = "stop" if self.finished else None
        return [self._indexed(index, sent)] if sent else []

    def finish(self) -> list[Tensors]:
        """See `Part.finish`: one for each sequence that has anything left to send."""
        if self._prompt.beams > 1:
            return []
        self._texts = self._texts or {0: self._new()}
        last = [(index, text.finish()) for index, text in self._texts.items()]
        return [self._indexed(index, tensors) for index, tensors in last if tensors]

    def _response(self, event: TokenEvent) -> EngineResponse:
        assert self._others is not None
        made = self._others.of(event)
        outputs = {name: tensor for name, tensor in made.items() if name in self._outputs}
        last = event.finish is not None
        return EngineResponse([event.token_ids] if event.token_ids or last else [], outputs)

    def _beams(self, rows: list[list[int]], outputs: Tensors) -> Tensors:
        texts = []
        for row in rows:
            text = self._new()
            text.feed(row, {})
            texts.append(text.finish().get("text_output", _texts([""]))[0].decode())
        return {"text_output": _texts(texts), **outputs, **self._ids(rows)}

    def _ids(self, rows: list[list[int]]) -> Tensors:
        if "output_ids" not in self._outputs:
            return {}
        before = self._prompt.ids if self._prompt.echo else []
        return {"output_ids": padded([[*before, *row] for row in rows])}

    def _indexed(self, sequence: int, tensors: Tensors) -> Tensors:
        indices = {"batch_index": self._batch_index, "sequence_index": sequence}
        return tensors | {
            name: np.array([[index]], dtype=np.int32)
            for name, index in indices.items()
            if name in self._outputs
        }


def joined(responses: Sequence[Tensors]) -> Tensors:
    """One response for a whole batch: tensors in a row, padded with zeros to the longest."""
    if len(responses) < 2:
        return responses[0] if responses else {}
    names = set.intersection(*(set(tensors) for tensors in responses))
    return {name: _stacked([tensors[name] for tensors in responses]) for name in sorted(names)}


def padded(rows: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
    """Token ids as INT32 [rows, longest], padded with zeros."""
    return _stacked([np.array([row], dtype=np.int32) for row in rows])


def _stacked(tensors: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    longest = max(tensor.shape[-1] for tensor in tensors)
    if tensors[0].ndim == 1:
        return np.concatenate(tensors)
    return np.concatenate(
        [
            np.pad(tensor, [(0, 0)] * (tensor.ndim - 1) + [(0, longest - tensor.shape[-1])])
            for tensor in tensors
        ]
    )


def _texts(texts: Sequence[str]) -> npt.NDArray[np.object_]:
    """One item a sequence, without a dimension for the batch, as TensorRT-LLM's models have it."""
    return np.array([text.encode() for text in texts], dtype=object)
