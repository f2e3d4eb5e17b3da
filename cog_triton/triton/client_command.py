"""``cog-triton client``: text to token ids, and what is printed of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cog_triton import errors
from cog_triton.settings import load_settings
from cog_triton.text.tokenizer import EngineTokenizer
from cog_triton.triton.client import TritonClient
from cog_triton.triton.token_request import Question, ask


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids and, unless ids were given, the text and the tokenizer that they came from."""

    ids: Sequence[int]
    text: str | None = None
    tokenizer: EngineTokenizer | None = None

    @property
    def end_id(self) -> int | None:
        """The tokenizer's end of sequence."""
        if self.tokenizer is None or self.tokenizer.eos_token is None:
            return None
        return self.tokenizer.token_id(self.tokenizer.eos_token)


def prompt_of(ids: Sequence[int] | None, text: str, tokenizer_dir: Path | None) -> Prompt:
    """The ids if given, else `text` by the tokenizer of `tokenizer_dir` or of ENGINE_DIR.

    Raises:
        TritonTokenizerError: there is no usable tokenizer, and it is needed.
    """
    if ids is not None:
        return Prompt(ids, None, EngineTokenizer.load(tokenizer_dir) if tokenizer_dir else None)
    directory = tokenizer_dir or load_settings().engine_dir
    if not (directory / "tokenizer.json").is_file():
        raise errors.TritonTokenizerError(
            f"{directory / 'tokenizer.json'}: not there; name a tokenizer with --tokenizer-dir, or"
            " send --input-ids"
        )
    tokenizer = EngineTokenizer.load(directory)
    return Prompt(tokenizer.encode(text), text, tokenizer)


def run(
    url: str, timeout: float, prompt: Prompt, question: Question, say: Callable[[str], None]
) -> None:
    """Ask Triton at `url`, and tell the answer as TensorRT-LLM's own client does."""
    client = TritonClient(_checked(url), timeout, _to_error)
    try:
        answer = ask(client, question, lambda ids: say(str(ids)))
    finally:
        asyncio.run(client.aclose())
    count = max(map(len, answer.sequences))
    if not question.stop_after_ms:
        say("Got completed request")
    elif answer.stopped:
        say(f"Stopped after {question.stop_after_ms} ms: {count} of {question.output_len} tokens")
    else:
        say(f"Got completed request: it had ended before {question.stop_after_ms} ms")
    shown = [[*prompt.ids, *ids] for ids in answer.sequences]
    say(f"output_ids = {answer.sequences if question.exclude_input else shown}")
    if prompt.text is not None:
        say(f"Input: {prompt.text}")
    if prompt.tokenizer is not None:
        for number, ids in enumerate(answer.sequences):
            name = "Output" if len(answer.sequences) == 1 else f"Output {number}"
            say(f"{name}: {prompt.tokenizer.tokenizer.decode(ids)}")


def _to_error(text: str) -> errors.CogTritonError:
    return errors.from_text(text) or errors.TritonUnknownError(text)


def _checked(url: str) -> str:
    full = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(full)
        usable = parts.scheme == "http" and parts.hostname and parts.port != 0
    except ValueError:
        usable = None
    if not usable:
        raise errors.InvalidArgument(f"--url={url!r}: must be HOST:PORT or http://HOST:PORT")
    return full
