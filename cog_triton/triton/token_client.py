"""Token client (``cog-triton client``): tokenizes a prompt, sends it, prints the response.

The request is that of the client of TensorRT-LLM's backend, whose tensors are sent over HTTP.
Source: triton_backend/inflight_batcher_llm/client/inflight_batcher_llm_client.py of TensorRT-LLM
1.2.
"""

from __future__ import annotations

import csv
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cog_triton import errors
from cog_triton.engines.generate_stream import GenerateEndpoint, to_error
from cog_triton.errors import CogTritonError, InvalidArgument, TritonMalformedEvent
from cog_triton.settings import load_settings
from cog_triton.system.redaction import redact_address
from cog_triton.text.sampling import SAMPLING, SamplingParams
from cog_triton.text.tokenizer import EngineTokenizer
from cog_triton.triton.token_transport import as_list

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """Request parameters; `sampling` has those to send, by the names of `SamplingParams`.

    With `stop_after_ms` above 0, the engine is stopped after that time by a second request with the
    same id or, with `stop_by_disconnect`, by closing the connection, which loses a response that is
    not streamed.
    """

    input_ids: Sequence[int]
    output_len: int
    sampling: Mapping[str, float] = field(default_factory=dict)
    beam_width: int = 1
    return_sequences: int | None = None
    end_id: int | None = None
    pad_id: int | None = None
    streaming: bool = False
    exclude_input: bool = False
    stop_after_ms: int = 0
    stop_by_disconnect: bool = False
    request_id: str = ""
    model: str = "tensorrt_llm"

    def __post_init__(self) -> None:
        """Raise E1005 for values out of range, before anything is sent."""
        if not self.input_ids:
            raise InvalidArgument("input_ids: there is no token to send")
        SamplingParams(max_tokens=self.output_len, **self.sampling)  # type: ignore[arg-type]

    def values(self) -> dict[str, Any]:
        """The request as JSON values; unset ones are left to the engine's defaults."""
        sampling = {item.tensor: self.sampling.get(item.name) for item in SAMPLING if item.tensor}
        optional = {
            **sampling,
            "end_id": self.end_id,
            "pad_id": self.pad_id,
            "num_return_sequences": self.return_sequences,
            "exclude_input_in_output": self.exclude_input or None,
        }
        return {
            "input_ids": list(self.input_ids),
            "input_lengths": len(self.input_ids),
            "beam_width": self.beam_width,
            "streaming": self.streaming,
            **{name: value for name, value in optional.items() if value is not None},
            "request_output_len": self.output_len,
        }


@dataclass(slots=True)
class TokenResponse:
    """Generated token ids without the input, in `sequences` by beam or sequence.

    `stopped` says whether a stop was sent before the end.
    """

    sequences: list[list[int]]
    stopped: bool


def send_token_request(
    endpoint: GenerateEndpoint,
    request: TokenRequest,
    on_tokens: Callable[[list[int]], None] = lambda ids: None,
) -> TokenResponse:
    """Send `request` and wait for the complete response; `on_tokens` gets streamed ids.

    Raises the coded error of the engine or of the connection.
    """
    request_id = request.request_id or f"client-{os.getpid()}-{next(_numbers)}"
    http = endpoint.request(request.values(), request_id)
    stopper = _DelayedStop(
        request.stop_after_ms,
        http.abort if request.stop_by_disconnect else lambda: endpoint.stop(request_id),
    )
    found: dict[int, list[int]] = {}
    try:
        with stopper:
            for event in http.events():
                for index, ids in _sequences(event, request):
                    found.setdefault(index, []).extend(ids)
                    if request.streaming:
                        on_tokens(ids)
    except CogTritonError:
        if not (stopper.stopped and request.stop_by_disconnect):
            raise
    if stopper.error is not None:
        raise stopper.error
    sequences = [found[index] for index in sorted(found)]
    if not (request.streaming or request.exclude_input):
        sequences = [ids[len(request.input_ids) :] for ids in sequences]
    return TokenResponse(sequences or [[]], stopper.stopped)


class _DelayedStop:
    """Timer that calls `stop` once after a delay, unless its context is left earlier."""

    def __init__(self, after_ms: int, stop: Callable[[], None]) -> None:
        self._after_s = after_ms / 1000
        self._stop = stop
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self.stopped = False
        self.error: CogTritonError | None = None

    def __enter__(self) -> None:
        if self._after_s:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _wait(self) -> None:
        deadline = time.monotonic() + self._after_s
        if self._ended.wait(deadline - time.monotonic()):
            return
        self.stopped = True
        try:
            self._stop()
        except CogTritonError as error:
            self.error = error


def _sequences(event: Mapping[str, Any], request: TokenRequest) -> list[tuple[int, list[int]]]:
    """Token ids of an event by index of beam or sequence; beams are padded to the longest."""
    ids = _whole_numbers(event, "output_ids")
    if not ids:
        return []
    lengths = _whole_numbers(event, "sequence_length")
    first = next(iter(_whole_numbers(event, "sequence_index")), 0)
    if request.beam_width == 1:
        return [(first, ids[: lengths[0]] if lengths and not request.streaming else ids)]
    width = len(ids) // request.beam_width
    if width * request.beam_width != len(ids) or len(lengths) != request.beam_width:
        raise TritonMalformedEvent(
            f"{len(ids)} output_ids and {len(lengths)} lengths for {request.beam_width} beams"
        )
    return [
        (beam, ids[beam * width : beam * width + length]) for beam, length in enumerate(lengths)
    ]


def _whole_numbers(event: Mapping[str, Any], name: str) -> list[int]:
    """An integer tensor as a list; Triton writes a single element as a bare number."""
    numbers: list[int] = as_list(event.get(name, []))
    if any(type(number) is not int for number in numbers):
        raise TritonMalformedEvent(f"{name}={event[name]!r}: must be whole numbers")
    return numbers


def read_ids(path: Path) -> list[int]:
    """Read token ids from the first row of a CSV file; raises E1005 naming file and reason."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            row = next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(
            f"--input-tokens-csv={str(path)!r}: cannot be read: {error}"
        ) from error
    return parse_ids(f"--input-tokens-csv={str(path)!r}", row)


def parse_ids(name: str, words: Sequence[str]) -> list[int]:
    """Parse decimal token ids; raises E1005."""
    for word in words:
        if not word.strip().isdecimal():
            raise InvalidArgument(f"{name}: {word!r} is not a token id")
    return [int(word) for word in words]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids and, unless given as ids, the text and the tokenizer that they come from."""

    ids: Sequence[int]
    text: str | None = None
    tokenizer: EngineTokenizer | None = None

    @property
    def end_id(self) -> int | None:
        """The tokenizer's end-of-sequence id, if any."""
        if self.tokenizer is None or self.tokenizer.eos_token is None:
            return None
        return self.tokenizer.token_id(self.tokenizer.eos_token)


def load_prompt(ids: Sequence[int] | None, text: str, tokenizer_dir: Path | None) -> TokenPrompt:
    """The given ids, else `text` encoded by the tokenizer of `tokenizer_dir` or ENGINE_DIR.

    Raises:
        TritonTokenizerError: a tokenizer is needed and not usable.
    """
    if ids is not None:
        return TokenPrompt(
            ids, None, EngineTokenizer.load(tokenizer_dir) if tokenizer_dir else None
        )
    directory = tokenizer_dir or load_settings().engine_dir
    if not (directory / "tokenizer.json").is_file():
        raise errors.TritonTokenizerError(
            f"{directory / 'tokenizer.json'}: not there; name a tokenizer with --tokenizer-dir, or"
            " send --input-ids"
        )
    tokenizer = EngineTokenizer.load(directory)
    return TokenPrompt(tokenizer.encode(text), text, tokenizer)


def send_and_print(
    url: str,
    timeout: float,
    prompt: TokenPrompt,
    request: TokenRequest,
    echo: Callable[[str], None],
) -> None:
    """Send the request to Triton at `url`; print the response as TensorRT-LLM's client does."""
    endpoint = GenerateEndpoint.at(_base_url(url), request.model, to_error, timeout)
    answer = send_token_request(endpoint, request, lambda ids: echo(str(ids)))
    count = max(map(len, answer.sequences))
    if not request.stop_after_ms:
        echo("Got completed request")
    elif answer.stopped:
        echo(f"Stopped after {request.stop_after_ms} ms: {count} of {request.output_len} tokens")
    else:
        echo(f"Got completed request: it had ended before {request.stop_after_ms} ms")
    shown = [[*prompt.ids, *ids] for ids in answer.sequences]
    echo(f"output_ids = {answer.sequences if request.exclude_input else shown}")
    if prompt.text is not None:
        echo(f"Input: {prompt.text}")
    if prompt.tokenizer is not None:
        for number, ids in enumerate(answer.sequences):
            name = "Output" if len(answer.sequences) == 1 else f"Output {number}"
            echo(f"{name}: {prompt.tokenizer.tokenizer.decode(ids)}")


def _base_url(url: str) -> str:
    full = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(full)
        usable = parts.scheme == "http" and parts.hostname and parts.port != 0
    except ValueError:
        usable = None
    if not usable:
        raise errors.InvalidArgument(
            f"--url={redact_address(url)!r}: must be HOST:PORT or http://HOST:PORT"
        )
    return full
