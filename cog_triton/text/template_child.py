"""Child process that renders chat templates in Jinja's sandbox, with limits of CPU and memory.

A template comes with the model. The sandbox keeps it from our objects, and not from running for
hours or making gigabytes of text: the kernel does, by a timer and a resource limit.
"""

from __future__ import annotations

import json
import marshal
import signal
import sys
from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cog_triton.ipc import child

RENDERED = b"T"
REFUSED = b"R"
BROKEN = b"B"
FAILED = b"F"
EXCEEDED = b"X"
_MOST_OF_AN_ERROR = 2000


class OutputTooLong(Exception):
    """The rendered text is longer than the request allows."""


class _Generation(Extension):
    """``{% generation %}`` marks what to train on in some chat templates; here it is just text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def environment() -> ImmutableSandboxedEnvironment:
    """The environment that Hugging Face gives chat templates."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


@lru_cache(maxsize=16)
def _compile(source: str) -> Template:
    return environment().from_string(source)


def _joined(pieces: Iterable[str], most: int) -> str:
    kept, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > most:
            raise OutputTooLong(f"more than {most} characters of text")
        kept.append(piece)
    return "".join(kept)


def render(source: str, most: int, variables: dict[str, Any]) -> tuple[bytes, str]:
    """The kind of the reply, and the text or what is wrong."""
    try:
        return RENDERED, _joined(_compile(source).generate(variables), most)
    except TemplateSyntaxError as error:
        return BROKEN, f"line {error.lineno}: {error.message}"
    except TemplateError as error:
        return REFUSED, str(error)[:_MOST_OF_AN_ERROR]
    except OutputTooLong as error:
        return EXCEEDED, str(error)
    except MemoryError:
        return EXCEEDED, ""
    except Exception as error:  # noqa: BLE001 - a template can fail in as many ways as any program
        return FAILED, f"{type(error).__name__}: {str(error)[:_MOST_OF_AN_ERROR]}"


def _answer(request: memoryview, cpu_seconds: float) -> tuple[bytes, bytes]:
    """The kind of the reply, and its text; SIGPROF ends the process at the CPU limit."""
    source, most, variables = marshal.loads(request)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    kind, text = render(source, most, variables)
    del source, variables
    data = text.encode("utf-8", "surrogatepass")
    signal.setitimer(signal.ITIMER_PROF, 0)
    return kind, data


def main() -> None:
    """Entry point: descriptor of the connection, CPU seconds of a template, bytes of memory."""
    descriptor, cpu_seconds, memory_bytes = sys.argv[1:]
    # The parent's mask and ignored signals are inherited.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    # Modules that rendering imports late count as used, not as the template's.
    render("{{ [1] | tojson }}{{ strftime_now('%Y') }}", 99, {})
    child.limit(int(memory_bytes))
    child.serve(int(descriptor), partial(_answer, cpu_seconds=float(cpu_seconds)))


if __name__ == "__main__":
    main()
