"""Text responses of the models that stream text: made from the engine's responses to a prompt."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton.backend.text_inputs import Prompt, Tensors
from cog_triton.text.stop_strings import TextStream
from cog_triton.text.tokenizer import EngineTokenizer

_GROWING = ("output_log_probs", "output_ids")


@dataclass(frozen=True, slots=True)
class EngineResponse:
    """New token ids of each beam, and the requested outputs that came with them."""

    beams: list[list[int]]
    outputs: Tensors
    sequence_index: int = 0
    finish: str | None = None


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


class PromptResponses:
    """Responses to one prompt: of one sequence, of several by turns, or of all beams at once.

    Each has the indices of its prompt in the batch and of its sequence, as far as `outputs`, the
    names that the client asked for, has them.
    """

    def __init__(
        self,
        tokenizer: EngineTokenizer,
        prompt: Prompt,
        outputs: Collection[str],
        *,
        batch_index: int = 0,
        accumulate: bool = False,
    ) -> None:
        self._prompt = prompt
        self._outputs = outputs
        self._batch_index = batch_index
        self._new: Callable[[], TextResponses] = lambda: TextResponses(
            tokenizer,
            prompt.stop_words,
            min_tokens=prompt.min_tokens,
            streaming=prompt.streaming,
            accumulate=accumulate,
            prompt_ids=prompt.ids if prompt.echo else (),
        )
        self._texts: dict[int, TextResponses] = {}
        self.tokens = 0
        """Tokens that the last response had."""

    @property
    def finished(self) -> bool:
        """Whether the engine can be stopped: each sequence has met a stop string."""
        complete = len(self._texts) >= self._prompt.sequences
        return (
            complete
            and self._prompt.beams == 1
            and all(text.finished for text in self._texts.values())
        )

    def feed(self, response: EngineResponse) -> Tensors:
        """Add an engine response; returns the response to send now, empty if there is none yet."""
        rows = [self._prompt.without_input(row) for row in response.beams]
        self.tokens = sum(map(len, rows))
        if self._prompt.beams > 1:
            return self._indexed(0, self._beams(rows, response.outputs))
        index, outputs = response.sequence_index, response.outputs
        if index not in self._texts:
            self._texts[index] = self._new()
            outputs |= self._ids(rows)
        elif "output_ids" in self._outputs:
            outputs["output_ids"] = padded(rows)
        text = self._texts[index]
        return {} if text.finished else self._indexed(index, text.feed(rows[0], outputs))

    def finish(self) -> list[Tensors]:
        """The last responses, one for each sequence that has anything left to send."""
        if self._prompt.beams > 1:
            return []
        self._texts = self._texts or {0: self._new()}
        last = [self._indexed(index, text.finish()) for index, text in self._texts.items()]
        return [tensors for tensors in last if tensors]

    def _beams(self, rows: list[list[int]], outputs: Tensors) -> Tensors:
        texts = []
        for row in rows:
            text = self._new()
            text.feed(row, {})
            texts.append(text.finish().get("text_output", _texts([""]))[0].decode())
        return {"text_output": _texts(texts), **outputs, **self._ids(rows)}

    def _ids(self, rows: list[list[int]]) -> Tensors:
        """The first output_ids of each row, after the prompt's where that is asked for."""
        if "output_ids" not in self._outputs:
            return {}
        before = self._prompt.ids if self._prompt.echo else []
        return {"output_ids": padded([[*before, *row] for row in rows])}

    def _indexed(self, sequence: int, tensors: Tensors) -> Tensors:
        if not tensors:
            return {}
        indices = {"batch_index": self._batch_index, "sequence_index": sequence}
        return tensors | {
            name: np.array([[index]], dtype=np.int32)
            for name, index in indices.items()
            if name in self._outputs
        }


def joined(responses: Sequence[Tensors]) -> Tensors:
    """One response for a whole batch: tensors in a row, padded with zeros to the longest."""
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
