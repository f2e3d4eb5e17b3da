"""Chat template of the tokenizer, rendered in a sandbox as Hugging Face does.

It is rendered in a pool of child processes, which are killed above their limits. One round trip
takes some 20 us; children start on demand, and end with this process.
"""

from __future__ import annotations

import atexit
import marshal
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, nodes

from cog_triton.errors import BadMessages, TritonTokenizerError, TritonUnknownError
from cog_triton.ipc.child import PythonChild
from cog_triton.text import template_child as child
from cog_triton.text.template_child import environment
from cog_triton.text.tokenizer import EngineTokenizer


@lru_cache(maxsize=16)
def template_variables(source: str) -> frozenset[str]:
    """Names that the template reads, its own variables included; none if it is broken."""
    try:
        tree = environment().parse(source)
        return frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx == "load")
    except (TemplateError, RecursionError):
        return frozenset()


CPU_S = 2.0
MEMORY_BYTES = 512 << 20
_ANSWER_S = 30.0
_SECOND_AFTER_S = 0.1
# Text may be rendered twice, and each message has its marks.
_OUTPUT_FACTOR = 4
_OUTPUT_CHARS = 1 << 20


class TemplateRefused(Exception):
    """The template refuses its variables, by raise_exception() or by failing."""


def most_text(size: int) -> int:
    """Characters of text that a template may make of `size` characters."""
    return _OUTPUT_CHARS + _OUTPUT_FACTOR * size


def exceeded(reason: str) -> BadMessages:
    """E1006 for a template that was stopped."""
    return BadMessages(f"the model's chat template exceeds its limits: {reason}")


class _Place:
    """Place of one child, which is started when it is needed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.child: PythonChild | None = None

    def close(self) -> None:
        if self.child is not None:
            self.child.close()
            self.child = None


class TemplatePool:
    """Renders templates, two at a time; thread-safe."""

    def __init__(self, cpu_seconds: float = CPU_S, memory_bytes: int = MEMORY_BYTES) -> None:
        """Limits are CPU seconds of one rendering, and bytes of memory beyond those at start."""
        self._cpu_seconds, self._memory_bytes = cpu_seconds, memory_bytes
        self.places = _Place(), _Place()

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """The text of the template `source`; `variables` are what JSON has, with `messages`.

        Raises TemplateRefused, BadMessages (E1006) when it exceeds a limit, TritonTokenizerError
        (E2102) when it is broken, TritonUnknownError (E2100) when no process can be started.
        """
        most = most_text(sum(map(_size, variables.values())))
        request = marshal.dumps((source, most, dict(variables)))
        with self._place() as place:
            kind = child.EXCEEDED
            try:
                kind, text = self._ask(self._child(place), request, most)
            finally:
                # After an exception a reply may still come, and after too much its memory is full.
                if kind == child.EXCEEDED:
                    place.close()
        if kind == child.EXCEEDED:
            raise exceeded(text or f"more than {self._memory_bytes >> 20} MiB of memory")
        if kind == child.BROKEN:
            raise TritonTokenizerError(f"the chat template is broken: {text}")
        if kind == child.REFUSED:
            raise TemplateRefused(f"the model's chat template refuses the messages: {text}")
        if kind == child.FAILED:
            raise TemplateRefused(f"the model's chat template fails: {text}")
        return text

    def warm_up(self) -> None:
        """Start a child, so that the first request need not wait for it."""
        with self._place() as place:
            self._child(place)

    def close(self) -> None:
        """End the children."""
        for place in self.places:
            place.close()

    @contextmanager
    def _place(self) -> Iterator[_Place]:
        """The first place; the second one if a slow template has the first."""
        first, second = self.places
        place = first if first.lock.acquire(timeout=_SECOND_AFTER_S) else second
        if place is second:
            second.lock.acquire()
        try:
            yield place
        finally:
            place.lock.release()

    def _child(self, place: _Place) -> PythonChild:
        """The child of a place, another one if that has ended."""
        if place.child is not None and not place.child.alive:
            place.close()
        if place.child is None:
            limits = self._cpu_seconds, self._memory_bytes
            try:
                place.child = PythonChild(child.__name__, *limits, timeout=_ANSWER_S)
            except OSError as error:
                raise TritonUnknownError(
                    f"the process that renders chat templates does not start: {error}"
                ) from error
        return place.child

    def _ask(self, taken: PythonChild, request: bytes, most: int) -> tuple[bytes, str]:
        """The reply's kind and text; raises BadMessages when the child was killed."""
        try:
            taken.send(request)
            kind, text = taken.receive(4 * most + _OUTPUT_CHARS)
            return kind, str(text, "utf-8", "surrogatepass")
        except OSError as error:
            raise exceeded(self._reason_of_death(taken)) from error

    def _reason_of_death(self, taken: PythonChild) -> str:
        try:
            code = taken.process.wait(0.5)
        except subprocess.TimeoutExpired:
            return f"no answer in {_ANSWER_S:g} s"
        if code == -signal.SIGPROF:
            return f"more than {self._cpu_seconds:g} s of CPU time"
        return f"its process ended with {code}"


def _size(value: Any) -> int:
    """Characters of all texts in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(key) + _size(item) for key, item in value.items())
    return sum(map(_size, value)) if isinstance(value, list) else 0


POOL = TemplatePool()
atexit.register(POOL.close)


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: EngineTokenizer,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render the model's chat template for `messages`, up to the assistant's turn.

    `variables` are more of what it reads; with `tools`, it is the model's template for tools, if
    that is another. The text carries its own BOS: encode it with ``add_special_tokens=False``.
    Raises BadMessages (E1006) when the template refuses the messages, would leave out calls of
    tools or exceeds its limits, or the model has none, TritonTokenizerError (E2102) when the
    template itself is broken.
    """
    variables = variables or {}
    template = tokenizer.template_for(tools="tools" in variables)
    if template is None:
        raise BadMessages("the model has no chat template; use a prompt instead of messages")
    _check_calls(template, messages)
    try:
        return _apply(template, messages, tokenizer, variables)
    except TemplateRefused as error:
        others = [message for message in messages if message.get("role") != "system"]
        if len(others) == len(messages):
            raise BadMessages(str(error)) from error
        try:
            _apply(template, others, tokenizer, variables)
        except TemplateRefused as other:
            raise BadMessages(str(other)) from other
        raise BadMessages(f"{error}; this model takes no system prompt") from error


def _check_calls(template: str, messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse calls of tools, and their results, that the template would leave out."""
    for place, message in enumerate(messages):
        if ("tool_calls" in message or message["role"] == "tool") and "tool_calls" not in template:
            raise BadMessages(
                f"messages[{place}]: the model's chat template knows no calls of tools; set"
                " CHAT_TEMPLATE to one that does"
            )


def _apply(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tokenizer: EngineTokenizer,
    variables: Mapping[str, Any],
) -> str:
    return POOL.render(
        template,
        {
            **variables,
            "messages": list(messages),
            "add_generation_prompt": True,
            "bos_token": tokenizer.bos_token or "",
            "eos_token": tokenizer.eos_token or "",
        },
    )
