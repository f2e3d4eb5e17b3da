"""Token client (``cog-triton client``): tokenizes a prompt, sends it, prints the response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cog_triton import errors
from cog_triton.settings import load_settings
from cog_triton.system.redaction import redact_address
from cog_triton.text.tokenizer import EngineTokenizer
from cog_triton.triton.client import TritonClient
from cog_triton.triton.token_request import TokenRequest, send_token_request


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
    client = TritonClient(_base_url(url), timeout, _to_error)
    try:
        answer = send_token_request(client, request, lambda ids: echo(str(ids)))
    finally:
        asyncio.run(client.aclose())
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


def _to_error(text: str) -> errors.CogTritonError:
    return errors.from_text(text) or errors.TritonUnknownError(text)


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
