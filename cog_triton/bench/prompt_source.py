"""Prompt source: random prompts of a given length, or prompts of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from cog_triton.bench.options import Options
from cog_triton.errors import InvalidArgument
from cog_triton.text.tokenizer import EngineTokenizer

DEFAULT_OUTPUT = 128
_ID_RANGE = (100, 900)
"""Range of random token ids without a tokenizer; every vocabulary in use has these."""
_WORDS = tuple(
    """
    the quick brown fox over lazy dog and of to in is that for it on with as at by from this
    be are was or an have not you we all one time can new more out up about who get which go
    me when make like no just him know take people into year your good some could them see
    other than then now look only come its think also back after use two how our work first
    well way even want because any these give day most us water light house night world hand
    part place story small large long right left high low old great same last own state city
    line
    """.split()  # noqa: SIM905 - a line of text reads better than a column of words
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: text, its token ids (None if unknown), and the number of tokens to ask for."""

    text: str
    ids: tuple[int, ...] | None
    output_tokens: int
    messages: tuple[Mapping[str, str], ...] = ()


class PromptSource:
    """Prompts by request number: the same for the same seed, in any process."""

    def __init__(self, options: Options) -> None:
        """Raises E1005 for an unreadable file, or a tokenizer without tokens for our words."""
        self._seed = options.seed
        self._input = options.input_lengths
        self._output = options.output_lengths
        self._tokenizer = EngineTokenizer.load(options.tokenizer) if options.tokenizer else None
        self._words: Sequence[str] = _WORDS
        self._file: list[Entry] = []
        if options.prompt_file:
            self._file = _read(options.prompt_file)
            Random(self._seed).shuffle(self._file)
        elif self._tokenizer:
            self._words = [word for word in _WORDS if len(self._encode(f" {word}")) == 1]
            if not self._words:
                raise InvalidArgument(
                    f"--tokenizer={str(options.tokenizer)!r}: has no token for any of our words;"
                    " use --prompt-file"
                )
        self._ready: list[Prompt] = []

    def prepare(self, count: int) -> None:
        """Make the first `count` prompts in advance."""
        self._ready = [self._make(index) for index in range(count)]

    def get(self, index: int) -> Prompt:
        """The prompt of request `index`; negative ones are for warming up."""
        return self._ready[index] if 0 <= index < len(self._ready) else self._make(index)

    def describe(self) -> str:
        """Description of prompt lengths for the report."""
        if self._file:
            return f"{len(self._file)} prompts of a file"
        how = "exact by --tokenizer" if self._tokenizer else "words; --tokenizer makes exact tokens"
        return f"{self._input} ({how})"

    def _make(self, index: int) -> Prompt:
        random = Random(f"{self._seed}:{index}")
        if self._file:
            entry = self._file[index % len(self._file)]
            wanted = self._output.draw(random) if self._output else self._reply(entry)
            ids = tuple(self._encode(entry.text)) if self._tokenizer else None
            return Prompt(entry.text, ids, wanted, entry.messages)
        length = self._input.draw(random)
        wanted = self._output.draw(random) if self._output else DEFAULT_OUTPUT
        if self._tokenizer:
            return self._exact(length, wanted, random)
        ids = tuple(random.choices(range(*_ID_RANGE), k=length))
        return Prompt(" ".join(random.choices(_WORDS, k=length)), ids, wanted)

    def _exact(self, length: int, wanted: int, random: Random) -> Prompt:
        """Choose words until they are exactly `length` tokens."""
        words = random.choices(self._words, k=length)
        for _ in range(8):
            text = " ".join(words)
            ids = self._encode(text)
            if len(ids) == length:
                return Prompt(text, tuple(ids), wanted)
            if len(ids) < length:
                words += random.choices(self._words, k=length - len(ids))
            else:
                del words[max(1, len(words) - (len(ids) - length)) :]
                words[0] = random.choice(self._words)
        raise InvalidArgument(
            f"--n-input-tokens={self._input}: no prompt of {length} tokens can be made with this"
            " tokenizer"
        )

    def _encode(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _reply(self, entry: Entry) -> int:
        """Output length of a file's entry: what it asks for, else its reply's."""
        if entry.output_tokens:
            return entry.output_tokens
        if not entry.reply:
            return DEFAULT_OUTPUT
        return max(1, len(self._encode(entry.reply) if self._tokenizer else entry.reply.split()))


@dataclass(frozen=True, slots=True)
class Entry:
    """A prompt, or a chat's `messages` up to a user's turn, with the `reply` that followed."""

    text: str
    messages: tuple[Mapping[str, str], ...] = ()
    reply: str = ""
    output_tokens: int = 0


def _read(path: Path) -> list[Entry]:
    """Read a prompt file; raises E1005 naming the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"--prompt-file={str(path)!r}: cannot be read: {error}") from error
    entries = []
    for number, value in _values(path, text):
        entry = _entry(value)
        if entry is None:
            raise InvalidArgument(
                f"--prompt-file={str(path)!r}: entry {number}: must have 'prompt', 'messages' or"
                " 'conversations' with a first message of its user"
            )
        entries.append(entry)
    if not entries:
        raise InvalidArgument(f"--prompt-file={str(path)!r}: has no prompts")
    return entries


def _values(path: Path, text: str) -> list[tuple[int, Any]]:
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if text.lstrip().startswith("["):
        lines = [(1, text)]
    found = []
    for number, line in lines:
        try:
            found.append((number, json.loads(line)))
        except ValueError as error:
            raise InvalidArgument(
                f"--prompt-file={str(path)!r}: line {number}: not JSON: {error}"
            ) from error
    if len(found) == 1 and isinstance(found[0][1], list):
        return list(enumerate(found[0][1], 1))
    return found


def _entry(value: Any) -> Entry | None:
    """Parse a prompt, OpenAI's messages, or ShareGPT's conversation up to its first reply."""
    if not isinstance(value, dict):
        return None
    count = value.get("output_tokens", 0)
    if type(count) is not int or count < 0:
        return None
    if isinstance(value.get("prompt"), str) and value["prompt"].strip():
        return Entry(value["prompt"], output_tokens=count)
    turns = value.get("messages") or value.get("conversations")
    messages: list[Mapping[str, str]] = []
    for turn in turns if isinstance(turns, list) else []:
        if not isinstance(turn, dict):
            return None
        name = str(turn.get("role") or turn.get("from") or "")
        role = {"human": "user", "gpt": "assistant"}.get(name, name)
        content = turn.get("content") or turn.get("value")
        if not isinstance(content, str):
            return None
        if role == "assistant" and any(message["role"] == "user" for message in messages):
            return Entry(messages[-1]["content"], tuple(messages), content, count)
        messages.append({"role": role, "content": content})
    if messages and messages[-1]["role"] == "user":
        return Entry(messages[-1]["content"], tuple(messages), "", count)
    return None
