"""Error codes: one exception class a code; the tree is the list.

CogTritonError
  UserError        E1xxx: the caller can fix it; never retried
  FrameworkError   E2xxx: ours or the engine's fault; a retry may help

Cog hands clients nothing but the text of an exception, so the text always starts with
``<code> <Name>: ``; `from_text` reads it back out of a message that crossed a process.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from itertools import islice
from typing import ClassVar

# A comparison takes as long as the product of both lengths.
_MOST_CHARACTERS = 96
_MOST_NAMES = 1024


class CogTritonError(Exception):
    """Base of every error this project raises on purpose; ``str()`` carries the code."""

    code: ClassVar[str] = ""

    def __init__(self, detail: str) -> None:
        self.detail = detail
        super().__init__(f"{self.code} {type(self).__name__}: {detail}")

    def __reduce__(self) -> tuple[type[CogTritonError], tuple[str]]:
        return type(self), (self.detail,)


class UserError(CogTritonError):
    """The caller's input or configuration is at fault."""


class FrameworkError(CogTritonError):
    """The serving stack or the engine is at fault."""


class GenericError(UserError):
    """Generic user error (reserved)."""

    code = "E1000"


class PromptRequired(UserError):
    """The formatted prompt is blank."""

    code = "E1001"


class PromptTooLong(UserError):
    """The prompt leaves no room for output in the engine's sequence length."""

    code = "E1002"


class BadPromptTemplate(UserError):
    """A prompt was given with a template that has no `{prompt}`, so it would not be used."""

    code = "E1003"


class PromptTemplateError(UserError):
    """The prompt template is not a valid Python format string."""

    code = "E1004"


class InvalidArgument(UserError):
    """An input, setting or option has a value that is not allowed; names all three."""

    code = "E1005"


class BadMessages(UserError):
    """Chat messages are malformed, or the model's chat template refuses them."""

    code = "E1006"


class Unauthorized(UserError):
    """The API key is missing or wrong, or a web page of another site asks."""

    code = "E1007"


class RequestTooLarge(UserError):
    """The request has more bytes than MAX_REQUEST_BYTES, or its headers than MAX_HEADER_BYTES."""

    code = "E1008"


class NotFound(UserError):
    """There is no such path, method or model."""

    code = "E1009"


class RequestTimeout(UserError):
    """The request took longer than REQUEST_TIMEOUT to arrive."""

    code = "E1010"


class InvalidArgumentMinTokens(UserError):
    """Both min_tokens and min_new_tokens were set, to different values."""

    code = "E1101"


class InvalidArgumentMaxTokens(UserError):
    """Both max_tokens and max_new_tokens were set, to different values."""

    code = "E1102"


class UnexpectedEngineArg(UserError):
    """The engine has no such argument."""

    code = "E1201"


class InvalidPredictorConfig(UserError):
    """The serve configuration (COG_TRITON_CONFIG) is missing or invalid."""

    code = "E1202"


class BuildConfigInvalid(UserError):
    """The build config does not match its schema; names the YAML path, value and rule."""

    code = "E1300"


class UnknownExample(UserError):
    """The build config names an example family that does not exist, or that is not built."""

    code = "E1301"


class UnknownScript(UserError):
    """The example family has no such script."""

    code = "E1302"


class UnknownArgument(UserError):
    """A build script refuses an argument; names the YAML path, value, rule and nearest name."""

    code = "E1303"


class ModelUnavailable(UserError):
    """A model or engine to build from or to serve cannot be found or fetched."""

    code = "E1304"


class EngineIncompatible(UserError):
    """The engine cannot run on this machine; says what it needs and what is here."""

    code = "E1305"


class EngineCorrupt(UserError):
    """An engine directory or engine.tar is damaged, incomplete or unsafe to unpack."""

    code = "E1306"


class FatbinInvalid(UserError):
    """A file to prune holds device code that is not laid out as known; it was left untouched."""

    code = "E1307"


class TargetUnavailable(UserError):
    """Nothing that can be measured answers at the URL; says what was tried and what to start."""

    code = "E1400"


class MissingExtra(UserError):
    """An optional part of the package is needed and not installed; says how to install it."""

    code = "E1401"


class TritonUnknownError(FrameworkError):
    """Triton or the engine reported an error that has no code of its own."""

    code = "E2100"


class TritonTimeout(FrameworkError):
    """Triton sent nothing for TRITON_TIMEOUT seconds."""

    code = "E2101"


class TritonTokenizerError(FrameworkError):
    """The engine's tokenizer is missing or broken."""

    code = "E2102"


class TritonMalformedJSON(FrameworkError):
    """Triton sent an event that is not JSON."""

    code = "E2103"


class TritonMalformedEvent(FrameworkError):
    """Triton sent an event with neither output_ids nor error."""

    code = "E2104"


class TritonUnavailable(FrameworkError):
    """Triton crashed, is restarting, or cannot be reached."""

    code = "E2105"


class TritonStartFailed(FrameworkError):
    """Triton or Cog died or was late at the start, or failed its first request; with log lines."""

    code = "E2106"


class Overloaded(FrameworkError):
    """Every engine slot and every place in the queue is taken; try again later."""

    code = "E2107"
    retry_after = 1.0
    """Seconds to wait, as far as is known."""


class FatalRequest(FrameworkError):
    """The engine died of this request three times; its prompt is refused for ten minutes."""

    code = "E2108"


class EngineNotParked(FrameworkError):
    """The engine could not be moved off the GPU, says why; it runs there as before."""

    code = "E2110"


class EngineNotRestored(FrameworkError):
    """The engine ended or did not answer while it fell asleep or woke up; it is ended."""

    code = "E2111"


class CanaryFailed(FrameworkError):
    """The engine answers its canary with other tokens than when it was built."""

    code = "E2112"


class ParserFailed(FrameworkError):
    """vLLM's parser failed at this answer, ran on or took too much memory."""

    code = "E2114"


class VLLMUnknownError(FrameworkError):
    """vLLM reported an error that has no code of its own."""

    code = "E2200"


class BuildStepFailed(FrameworkError):
    """A build step exited non-zero; carries the step, exit code and last lines."""

    code = "E2300"


class BuildStepTimeout(FrameworkError):
    """A build step ran longer than its time limit and was stopped."""

    code = "E2301"


class DiskFull(FrameworkError):
    """There is not enough disk space for what is to be written; says how much is needed."""

    code = "E2302"


class BuildCancelled(FrameworkError):
    """The build was cancelled and its processes were stopped."""

    code = "E2303"


class PushFailed(FrameworkError):
    """A registry failed, or could not be reached, time after time; what it has got stays there."""

    code = "E2304"


class NothingSucceeded(FrameworkError):
    """Every request of a measurement failed, or those that warm up did; carries the reason."""

    code = "E2400"


def all_errors() -> list[type[CogTritonError]]:
    """Every concrete error class, by code."""
    found: list[type[CogTritonError]] = []
    pending: list[type[CogTritonError]] = [CogTritonError]
    while pending:
        cls = pending.pop()
        pending.extend(cls.__subclasses__())
        if cls.code:
            found.append(cls)
    return sorted(found, key=lambda cls: cls.code)


_CODED = re.compile(r"\b(E[12]\d{3}) [A-Za-z]+: (.*)", re.DOTALL)


def from_text(text: str) -> CogTritonError | None:
    """The error whose coded text is embedded in `text`, or None if there is none."""
    match = _CODED.search(text)
    if match is None:
        return None
    by_code = {cls.code: cls for cls in all_errors()}
    cls = by_code.get(match[1])
    # Triton appends where a Python model raised.
    return cls(match[2].partition("\n\nAt:\n")[0].strip()) if cls else None


def nearest(word: str, known: Sequence[str]) -> str:
    """A ``; did you mean ...?`` suffix naming the closest of `known`, or ``""``.

    Nothing is near a word of more than 96 characters, and 1024 of `known` are compared at most.
    """
    if len(word) > _MOST_CHARACTERS:
        return ""
    names = [name for name in islice(known, _MOST_NAMES) if len(name) <= _MOST_CHARACTERS]
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
