"""Child process that parses answers by vLLM's own parsers, each bounded in CPU time and memory.

A timer ends a parser that runs on: its signal raises an exception amid Python code, and in the
loops of `re`, `regex` and `json`. A limit of the process ends one that eats memory. Only the stream
of that answer fails. Native code that looks for no signals (Rust's in tokenizers and
openai-harmony) or aborts without memory is ended only with the process: the server kills it if it
does not answer, and then all of its streams fail.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import msgspec

from cog_triton.errors import InvalidArgument
from cog_triton.ipc import child

AUTO = "auto"
_MOST_OF_AN_ERROR = 300
_MOST_OF_A_RESULT = 16 << 20
# Names of a model's type in its config.json, where vLLM's table has it by another.
_KNOWN_AS = {
    "gpt_oss": ("openai", "openai_gptoss"),
    "glm4_moe": ("glm45",),
    "glm4_moe_lite": ("glm47", "glm45"),
    "glm_moe_dsa": ("glm47", "glm45"),
    "deepseek_v32": ("deepseek_v32", "deepseek_v3"),
    "ernie4_5_moe": ("ernie45",),
    "gemma3_text": ("functiongemma",),
    "granitemoehybrid": ("granite4", "granite"),
    "hunyuan_v1_moe": ("hunyuan_a13b",),
    "internlm2": ("internlm",),
    "lfm2_moe": ("lfm2",),
    "llama4": ("llama4_pythonic",),
    "longcat_flash": ("longcat",),
    "minimax": ("minimax_m2",),
    "phi3": ("phi4_mini_json",),
    "qwen3_next": ("qwen3_coder", "qwen3"),
    "qwen3_5": ("qwen3_coder", "qwen3"),
    "qwen3_5_moe": ("qwen3_coder", "qwen3"),
    "step3_text": ("step3",),
}


class _Exceeded(BaseException):
    """A parser has used up its CPU time; its own handlers of errors do not take this for one."""


class Parsers:
    """Parsers of one model, by the names that vLLM has for them; streams by their numbers."""

    def __init__(self, tokenizer: str, tool: str, reasoning: str, types: list[str]) -> None:
        from vllm import __version__
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser import ParserManager
        from vllm.reasoning import ReasoningParserManager as Reasonings
        from vllm.tokenizers import get_tokenizer
        from vllm.tool_parsers import ToolParserManager as Tools

        self.version = str(__version__)
        known = {*Tools.tool_parsers, *Tools.lazy_parsers}
        self.tool = self._chosen("tool call", tool, known, types)
        known = {*Reasonings.reasoning_parsers, *Reasonings.lazy_parsers}
        like = [] if tool == AUTO else [self.tool]
        self.reasoning = self._chosen("reasoning", reasoning, known, [*like, *types])
        self._request = ChatCompletionRequest
        self._tokenizer = get_tokenizer(tokenizer)
        self._parser = ParserManager.get_parser(
            self.tool or None,
            self.reasoning or None,
            enable_auto_tools=bool(self.tool),
            is_harmony="openai" in self.tool or "gptoss" in self.reasoning,
            tokenizer=self._tokenizer,
        )
        self.streams: dict[int, Stream] = {}

    def _chosen(self, kind: str, name: str, known: set[str], types: list[str]) -> str:
        if name == AUTO:
            asked = (name for each in types for name in (*_KNOWN_AS.get(each, ()), each))
            return next((each for each in asked if each in known), "")
        if name and name not in known:
            raise InvalidArgument(
                f"TOOL_CALL_PARSER, REASONING_PARSER: vLLM {self.version} has no {kind} parser"
                f" {name!r}; it has {', '.join(sorted(known))}"
            )
        return name

    def result(self, word: str, number: int, *given: Any) -> Any:
        """The result of an item: a word, the number of a stream, and what the word needs."""
        if word == "plan":
            return self._stream(*given).plan()
        if word == "open":
            self.streams[number] = self._stream(*given)
        elif word == "close":
            self.streams.pop(number, None)
        else:
            return getattr(self.streams[number], word)(*given)
        return None

    def _stream(self, spec: Mapping[str, Any]) -> Stream:
        """A stream of a request; `prompt_token_ids` of `spec` are its prompt."""
        fields = dict(spec)
        prompt = fields.pop("prompt_token_ids", None)
        request = self._request(model="", messages=[], **fields)
        template = request.build_chat_params(None, "auto", None).with_defaults({})
        # As vLLM's server: one adjusts the request, by which another one parses.
        adjusting, parser = (
            self._parser(
                self._tokenizer, request.tools, chat_template_kwargs=template.chat_template_kwargs
            )
            for _ in range(2)
        )
        if prompt is not None:
            adjusting.set_prompt_token_ids(prompt)
        return Stream(parser, adjusting.adjust_request(request=request), prompt)


class Stream:
    """State of one stream: vLLM's parser and request."""

    def __init__(self, parser: Any, request: Any, prompt: list[int] | None) -> None:
        self._parser, self._request, self._prompt = parser, request, prompt
        self._calls: dict[int, int] = {}

    def plan(self) -> list[Any]:
        """The fields of a `RequestPlan`."""
        outputs, tool = self._request.structured_outputs, self._parser.tool_parser
        return [
            self._request.skip_special_tokens is False,
            outputs.structural_tag if outputs is not None else None,
            tool is not None and tool.supports_required_and_named,
        ]

    def whole(self, text: str, ids: list[int]) -> list[list[Any]]:
        """The deltas of a whole answer, which vLLM reads otherwise than a stream."""
        self._parser.set_prompt_token_ids(self._prompt or [])
        reasoning, content, calls = self._parser.parse(
            text, self._request, enable_auto_tools=True, model_output_token_ids=ids
        )
        return self._deltas(reasoning, content, enumerate(calls or ()))

    def feed(self, text: str, ids: list[int], finished: bool) -> list[list[Any]]:
        """The deltas of new text and token ids."""
        delta = self._parser.parse_delta(
            text, ids, self._request, prompt_token_ids=self._prompt, finished=finished
        )
        self._prompt = None
        if delta is None:
            return []
        calls = ((call.index, call.function) for call in delta.tool_calls or ())
        return self._deltas(delta.reasoning, delta.content, calls)

    def _deltas(
        self, reasoning: str, content: str, calls: Iterable[tuple[int, Any]]
    ) -> list[list[Any]]:
        """Deltas, each with its kind first; calls have numbers from 0, as they begin."""
        found: list[list[Any]] = [["reasoning", reasoning]] if reasoning else []
        if content:
            found.append(["content", content])
        for index, function in calls:
            if function is not None and function.name:
                self._calls[index] = len(self._calls)
                found.append(["call", self._calls[index], function.name])
            if function is not None and function.arguments:
                found.append(["arguments", self._calls[index], function.arguments])
        return found


_loaded: Parsers
_cpu_seconds: float
_limits: dict[type[BaseException], str]
"""Texts of the errors by which limits end a parser."""


def load(
    cpu_seconds: float, memory_bytes: int, tokenizer: str, names: tuple[str, str], types: list[str]
) -> dict[str, str]:
    """Load vLLM and its parsers of tool calls and of reasoning; returns its version, their names.

    Limits are CPU seconds of an item, and bytes of memory beyond what is loaded. Names may be
    blank, or `AUTO`: the first that vLLM has for one of `types`. Raises E1005 for a name that vLLM
    does not have, and whatever vLLM raises.
    """
    global _loaded, _cpu_seconds, _limits
    _loaded, _cpu_seconds = Parsers(tokenizer, *names, types), cpu_seconds
    _limits = {
        _Exceeded: f"it takes more than {cpu_seconds:g} s of CPU time",
        MemoryError: f"it takes more than {memory_bytes >> 20} MiB of memory",
    }
    signal.signal(signal.SIGPROF, _exceed)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    gc.collect()
    gc.freeze()  # vLLM has a million objects
    child.limit(memory_bytes)
    return {name: getattr(_loaded, name) for name in ("version", "tool", "reasoning")}


def parse(items: list[list[Any]]) -> list[Any]:
    """Results of items, in order; text is an error. The first that exceeds a limit is the last."""
    results: list[Any] = []
    exceeded = False
    for item in items:
        signal.setitimer(signal.ITIMER_PROF, _cpu_seconds, _cpu_seconds)
        try:
            result = msgspec.msgpack.encode(_loaded.result(*item))
            if len(result) > _MOST_OF_A_RESULT:
                raise ValueError(f"a result has {len(result)} bytes; {_MOST_OF_A_RESULT} at most")
            results.append(msgspec.Raw(result))
        except BaseException as error:  # noqa: BLE001 - a parser can fail in many ways
            signal.setitimer(signal.ITIMER_PROF, 0)
            exceeded = type(error) in _limits
            why = f"{type(error).__name__}: {error}"[:_MOST_OF_AN_ERROR]
            results.append(_limits.get(type(error), why))
            _loaded.streams.pop(item[1], None)
        if exceeded:
            gc.collect()  # the others get its memory
            break
    signal.setitimer(signal.ITIMER_PROF, 0)
    return results


def _exceed(*_: object) -> NoReturn:
    raise _Exceeded


if __name__ == "__main__":
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM logs; the parent's output is its own
    child.serve_calls(int(sys.argv[1]))
