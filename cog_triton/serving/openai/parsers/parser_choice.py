"""Choice of parsers of vLLM: by the settings, or by the type of the model of its engine."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from cog_triton.engines.base import EngineFamily
from cog_triton.engines.vllm.parser_child import AUTO
from cog_triton.errors import InvalidArgument, TritonStartFailed
from cog_triton.serving.openai.parsers import formats
from cog_triton.serving.openai.parsers.borrowed import BorrowedParsers
from cog_triton.settings import Settings
from cog_triton.settings.request_defaults import PREFIX
from cog_triton.text.tokenizer import EngineTokenizer

_log = logging.getLogger(__name__)


def borrow(
    settings: Settings, family: EngineFamily, tokenizer: EngineTokenizer, links: Path
) -> BorrowedParsers | None:
    """Parsers of vLLM that the settings name, or that its engine's model needs; None without.

    Raises E1005 for names that do not go together or that vLLM does not know, and E2106.
    """
    tool, reasoning = (
        name.removeprefix(PREFIX) if name.startswith(PREFIX) else ""
        for name in (settings.tool_call_parser, settings.reasoning_parser)
    )
    named = bool(tool or reasoning)
    if tool and settings.reasoning_parser not in ("auto", "none") and not reasoning:
        raise InvalidArgument(
            f"REASONING_PARSER={settings.reasoning_parser}: not beside TOOL_CALL_PARSER={PREFIX}"
            f"{tool}; name one of vLLM's, or none"
        )
    form = formats.format_of(tokenizer)
    automatic = family.parses and settings.tool_call_parser == "auto" and not named
    if automatic and form in (formats.PYTHONIC, formats.UNKNOWN):
        tool = AUTO
    if not (tool or reasoning):
        return None
    if tool and settings.reasoning_parser == "auto":
        reasoning = AUTO
    config = family.model_dir / "config.json"
    known = json.loads(config.read_text("utf-8")) if config.is_file() else {}
    types = [str(known.get("model_type", "")), *([form] if form == formats.PYTHONIC else [])]
    python = settings.cog_triton_vllm_python or Path(sys.executable)
    try:
        found = BorrowedParsers(
            python,
            links,
            family.tokenizer_dir,
            (tool, reasoning),
            types=types,
        )
    except TritonStartFailed as error:
        if named:
            raise
        _log.warning("%s", error)
        return None
    if not (found.tool or found.reasoning):
        found.close()
        if named:
            raise InvalidArgument(
                f"TOOL_CALL_PARSER={PREFIX}{AUTO}: vLLM {found.version} has no parser by the"
                f" model's type {known.get('model_type')!r}; name one"
            )
        return None
    _log.info("answers are parsed by vLLM %s, as %s", found.version, found.title)
    return found
