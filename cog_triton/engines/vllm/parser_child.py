"""Child process that parses answers by vLLM's own parsers, with limits of CPU and memory.

It imports vLLM once and forks for the work: a parser that runs on or eats memory ends the fork
alone, and the next one is there at once, without the state of any stream. What `READY` tells is
JSON: the parsers' names and vLLM's version, or an error; and why the last fork has ended.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any

from cog_triton.ipc import child

ANSWERED = b"A"
AUTO = "auto"
OUT_OF_MEMORY = 77
"""Exit code of a fork whose memory is at its limit."""
_PR_SET_PDEATHSIG = 1
_WALL_FACTOR = 3
_ARMED_S = 0.1
_MOST_OF_AN_ERROR = 300
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
    "olmo3": ("olmo3",),
    "phi3": ("phi4_mini_json",),
    "qwen3_next": ("qwen3_coder", "qwen3"),
    "qwen3_5": ("qwen3_coder", "qwen3"),
    "qwen3_5_moe": ("qwen3_coder", "qwen3"),
    "step3_text": ("step3",),
}


class UnknownParser(Exception):
    """VLLM has no parser of a name; tells those it has."""


class Parsers:
    """Parsers of one model, by the names that vLLM has for them; streams by their numbers."""

    def __init__(self, tokenizer: str, tool: str, reasoning: str, model_type: str) -> None:
        """Names may be blank, or `AUTO`; raises UnknownParser."""
        from vllm import __version__
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser import ParserManager
        from vllm.reasoning import ReasoningParserManager
        from vllm.tokenizers import get_tokenizer
        from vllm.tool_parsers import ToolParserManager

        self.version = str(__version__)
        tools = _registered(ToolParserManager, "tool_parsers")
        reasonings = _registered(ReasoningParserManager, "reasoning_parsers")
        self.tool = self._chosen("tool call", tool, tools, model_type)
        like = "" if tool == AUTO else self.tool
        self.reasoning = self._chosen("reasoning", reasoning, reasonings, like, model_type)
        self._request = ChatCompletionRequest
        self._tokenizer = get_tokenizer(tokenizer)
        self._parser = ParserManager.get_parser(
            self.tool or None,
            self.reasoning or None,
            enable_auto_tools=bool(self.tool),
            is_harmony="openai" in self.tool or "gptoss" in self.reasoning,
            tokenizer=self._tokenizer,
        )
        self._streams: dict[int, _Stream | str] = {}

    def _chosen(self, kind: str, name: str, known: list[str], *types: str) -> str:
        """A parser's name, which for `AUTO` is one of these types, blank if there is none."""
        if name == AUTO:
            asked = [name for each in types for name in (*_KNOWN_AS.get(each, ()), each)]
            return next((each for each in asked if each in known), "")
        if name and name not in known:
            raise UnknownParser(
                f"vLLM {self.version} has no {kind} parser {name!r}; it has {', '.join(known)}"
            )
        return name

    def answer(self, item: list[Any]) -> Any:
        """The result of an item: see `serving.openai.parsers.borrowed`."""
        match item:
            case ["delta", number, text, ids, finished]:
                stream = self._streams[number]
                return stream if isinstance(stream, str) else stream.feed(text, ids, finished)
            case ["whole", number, text, ids]:
                stream = self._streams[number]
                return stream if isinstance(stream, str) else stream.whole(text, ids)
            case ["open", number, spec]:
                try:
                    self._streams[number] = self._stream(spec)
                except Exception as error:  # noqa: BLE001 - told for its first delta
                    self._streams[number] = _told(error)
            case ["close", number]:
                self._streams.pop(number, None)
            case ["clear"]:
                self._streams.clear()
            case ["plan", spec]:
                return self._stream(spec).plan()
        return None

    def _stream(self, spec: Mapping[str, Any]) -> _Stream:
        """A stream of a request; `prompt_token_ids` of `spec` are its prompt."""
        fields = dict(spec)
        prompt = fields.pop("prompt_token_ids", None)
        request = self._request(model="", messages=[], **fields)
        template = request.build_chat_params(None, "auto", None).with_defaults({})

        def parser() -> Any:
            return self._parser(
                self._tokenizer, request.tools, chat_template_kwargs=template.chat_template_kwargs
            )

        # As vLLM's server: one adjusts the request, by which another one parses.
        adjusting = parser()
        if prompt is not None:
            adjusting.set_prompt_token_ids(prompt)
        return _Stream(parser(), adjusting.adjust_request(request=request), prompt)


class _Stream:
    """State of one stream: vLLM's parser and request."""

    def __init__(self, parser: Any, request: Any, prompt: list[int] | None) -> None:
        self._parser, self._request, self._prompt = parser, request, prompt

    def plan(self) -> dict[str, Any]:
        """What the request needs: whether special tokens are text, and a guide of the answer."""
        outputs = self._request.structured_outputs
        tool = self._parser.tool_parser
        return {
            "visible": self._request.skip_special_tokens is False,
            "tag": outputs.structural_tag if outputs is not None else None,
            "json": tool is not None and tool.supports_required_and_named,
        }

    def whole(self, text: str, ids: list[int]) -> list[list[Any]]:
        """The deltas of a whole answer, which vLLM reads otherwise than a stream."""
        self._parser.set_prompt_token_ids(self._prompt or [])
        reasoning, content, calls = self._parser.parse(
            text, self._request, enable_auto_tools=True, model_output_token_ids=ids
        )
        found = [["reasoning", reasoning], ["content", content]]
        for place, call in enumerate(calls or ()):
            found += [["call", place, call.name], ["arguments", place, call.arguments]]
        return [delta for delta in found if delta[-1]]

    def feed(self, text: str, ids: list[int], finished: bool) -> list[list[Any]] | None:
        """The deltas of new text and token ids; a name or arguments with the call's number."""
        delta = self._parser.parse_delta(
            text, ids, self._request, prompt_token_ids=self._prompt, finished=finished
        )
        self._prompt = None
        if delta is None:
            return None
        found: list[list[Any]] = []
        if delta.reasoning:
            found.append(["reasoning", delta.reasoning])
        if delta.content:
            found.append(["content", delta.content])
        for call in delta.tool_calls or ():
            if (function := call.function) is not None:
                if function.name:
                    found.append(["call", call.index, function.name])
                if function.arguments:
                    found.append(["arguments", call.index, function.arguments])
        return found


def _registered(manager: Any, names: str) -> list[str]:
    return sorted({*getattr(manager, names), *manager.lazy_parsers})


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MOST_OF_AN_ERROR]


def _answer(parsers: Parsers, request: memoryview, cpu_seconds: float) -> tuple[bytes, bytes]:
    """The number of the request, and the results of its items, in order; text is an error."""
    number, items = json.loads(bytes(request))
    results: list[Any] = []
    armed = -_ARMED_S
    for item in items:
        if (now := time.monotonic()) - armed >= _ARMED_S:  # a call takes much less, mostly
            armed = now
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            signal.setitimer(signal.ITIMER_REAL, cpu_seconds * _WALL_FACTOR)
        try:
            results.append(parsers.answer(item))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except BaseException as error:  # noqa: BLE001 - a parser can fail in many ways
            results.append(_told(error))
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return ANSWERED, json.dumps([number, results], separators=(",", ":")).encode()


def main() -> None:
    """Entry point: descriptor, CPU seconds, bytes of memory, tokenizer, names, model's type."""
    descriptor, cpu_seconds, memory_bytes, *names = sys.argv[1:]
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF, signal.SIGALRM})
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM logs; the parent's output is its own
    parsers: Parsers | None = None
    ready: dict[str, Any] = {}
    try:
        parsers = Parsers(*names)
        ready = {name: getattr(parsers, name) for name in ("version", "tool", "reasoning")}
    except Exception as error:  # noqa: BLE001 - told to the parent
        unknown = isinstance(error, UnknownParser)
        ready = {"error": str(error) if unknown else _told(error), "unknown": unknown}
    gc.collect()
    gc.freeze()
    warnings.simplefilter("ignore", DeprecationWarning)  # torch has threads, which a fork lacks
    parent = os.getpid()
    while pid := os.fork():
        _, status = os.waitpid(pid, 0)
        if (code := os.waitstatus_to_exitcode(status)) == 0:
            return
        ready["ended"] = code
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent and parsers is not None:
        child.limit(int(memory_bytes))
        seconds = float(cpu_seconds)
        child.serve(
            int(descriptor),
            lambda request: _answer(parsers, request, seconds),
            json.dumps(ready).encode(),
        )
    elif parsers is None:
        child.serve(int(descriptor), lambda _: (ANSWERED, b"[]"), json.dumps(ready).encode())


if __name__ == "__main__":
    main()
