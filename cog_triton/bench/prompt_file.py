"""Prompt files: JSON lines, or one JSON list, of prompts or conversations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cog_triton.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Entry:
    """A prompt, or a chat's `messages` up to a user's turn, with the `reply` that followed."""

    text: str
    messages: tuple[Mapping[str, str], ...] = ()
    reply: str = ""
    output_tokens: int = 0


def read(path: Path) -> list[Entry]:
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
