"""Tokenizer of an engine, by tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cog_triton.errors import InvalidArgument, TritonTokenizerError
from cog_triton.text.detokenize import Detokenizer, Vocabulary

# Prompts are encoded one by one, each on a thread of its own.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@dataclass(frozen=True, slots=True)
class EngineTokenizer:
    """Tokenizer with the settings that its vocabulary file does not carry.

    `add_bos` is tokenizer_config.json's ``add_bos_token``: whether a prompt starts with BOS, or
    None to leave that to tokenizer.json's post-processor, as Hugging Face does. `tool_template` is
    the chat template for chats with tools, None if there is only one.
    """

    tokenizer: Any
    chat_template: str | None = None
    tool_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    add_bos: bool | None = None
    _vocabularies: dict[frozenset[str], Vocabulary] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def load(cls, directory: Path) -> EngineTokenizer:
        """Load the tokenizer in `directory`.

        Raises TritonTokenizerError (E2102), naming the file, for one that is missing or broken.
        Truncation and padding, which training may have left on, are disabled: both would change
        prompts silently.
        """
        from tokenizers import Tokenizer  # not before: the Python of a stub may have none

        path = directory / "tokenizer.json"
        text = _read(path)
        try:
            tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing more specific
            raise TritonTokenizerError(f"{path}: not a tokenizer: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        path = directory / "tokenizer_config.json"
        config = _read_json(path)
        add_bos = config.get("add_bos_token")
        if not isinstance(add_bos, bool | None):
            raise TritonTokenizerError(f"{path}: add_bos_token={add_bos!r}: must be true or false")
        template, tool_template = _chat_templates(directory, path, config)
        loaded = cls(
            tokenizer=tokenizer,
            chat_template=template,
            tool_template=tool_template,
            bos_token=_special_token(path, config, "bos_token"),
            eos_token=_special_token(path, config, "eos_token"),
            add_bos=add_bos,
        )
        for token in (loaded.bos_token, loaded.eos_token):
            if token is not None and loaded.token_id(token) is None:
                raise TritonTokenizerError(f"{path}: {token!r} is not in the vocabulary")
        return loaded

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones."""
        size: int = self.tokenizer.get_vocab_size()
        return size

    @property
    def special_tokens(self) -> frozenset[str]:
        """Special tokens, as the text has them."""
        added = self.tokenizer.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    def detokenizer(self, visible: Collection[str] = ()) -> Detokenizer:
        """A new stream's; `visible` are special tokens that are part of the text."""
        key = frozenset(visible)
        found = self._vocabularies.get(key)
        if found is None:
            found = self._vocabularies[key] = Vocabulary(self.tokenizer, key)
        return Detokenizer.by(found)

    def with_template(self, path: Path) -> EngineTokenizer:
        """The tokenizer with the chat template in a file; raises E1005 if it cannot be read."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"CHAT_TEMPLATE={path}: cannot be read: {error}") from error
        return replace(self, chat_template=text, tool_template=None)

    def template_for(self, *, tools: bool) -> str | None:
        """The chat template, of a chat with tools or without."""
        return (self.tool_template if tools else None) or self.chat_template

    def token_id(self, token: str) -> int | None:
        """Id of a token as the vocabulary spells it; None if unknown."""
        found: int | None = self.tokenizer.token_to_id(token)
        return found

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, with at most one BOS at the start.

        `add_special_tokens` is False for text that brings its own, as that of a chat template.
        """
        # Of the three ways to encode, this one releases the GIL and keeps no offsets.
        (encoded,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        bos = None if self.bos_token is None else self.token_id(self.bos_token)
        if bos is None:
            return ids
        own = 0
        while own < len(ids) and ids[own] == bos:
            own += 1
        wanted = own > 0
        if add_special_tokens and self.add_bos is not None:
            wanted = self.add_bos or (wanted and text.startswith(str(self.bos_token)))
        return [bos, *ids[own:]] if wanted else ids[own:]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TritonTokenizerError(f"{path}: cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read(path))
    except ValueError as error:
        raise TritonTokenizerError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TritonTokenizerError(f"{path}: must be a JSON object")
    return content


def _special_token(path: Path, config: dict[str, Any], name: str) -> str | None:
    value = config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and (not isinstance(value, str) or not value):
        raise TritonTokenizerError(f"{path}: {name}: must be a token or its description")
    return value


def _chat_templates(
    directory: Path, path: Path, config: dict[str, Any]
) -> tuple[str | None, str | None]:
    """Chat template from the place Hugging Face prefers: a file of its own, then the config.

    The second one is for chats with tools, if there are several.
    """
    own = directory / "chat_template.jinja"
    if own.is_file():
        return _read(own), None
    value, tools = config.get("chat_template"), None
    beside = directory / "chat_template.json"
    if value is None and beside.is_file():
        path, value = beside, _read_json(beside).get("chat_template")
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value, tools = named.get("default"), named.get("tool_use")
        if value is None:
            names = ", ".join(map(str, named)) or "none"
            raise TritonTokenizerError(f"{path}: chat_template has no 'default' (has {names})")
    if not isinstance(value, str | None) or not isinstance(tools, str | None):
        raise TritonTokenizerError(f"{path}: chat_template: must be text or a list of templates")
    return value, tools
