"""Text responses of ``tensorrt_llm_bls``: made from the engine's responses to one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton.text.stream import TextStream
from cog_triton.text.tokenizer import EngineTokenizer

Tensors = dict[str, npt.NDArray[Any]]


class TextResponses:
    """Text of one sequence, streamed or whole, with the engine's other outputs beside it.

    Text is cut at stop strings and between characters. Other outputs wait for the next text: of
    each the latest is sent, of output_log_probs all. `accumulate` repeats all text so far in every
    streamed response; `prompt_ids` precede text that is not streamed.
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
            if name == "output_log_probs" and name in self._outputs:
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
        response = {"text_output": np.array([[self._text.encode()]], dtype=object), **self._outputs}
        self._outputs = {}
        if self._cumulative:
            self._sent = len(self._text)
        else:
            self._text = ""
        return response
