"""Helpers of the family's scripts: coded errors without tracebacks, progress lines, JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from cog_triton.errors import CogTritonError, ModelUnavailable

T = TypeVar("T")


def run(main: Callable[[], None]) -> None:
    """Run a script's main; a coded error becomes one line on stderr and exit status 1."""
    try:
        main()
    except CogTritonError as error:
        print(error, file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def say(line: str) -> None:
    print(line, flush=True)


def progress(items: Iterable[T], total: int, what: str, every_s: float = 2.0) -> Iterator[T]:
    """Yield `items`, printing progress every `every_s` seconds and at the end."""
    said = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        if done == total or time.monotonic() - said >= every_s:
            said = time.monotonic()
            say(f"{what}: {done}/{total}")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        ModelUnavailable: it is missing, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ModelUnavailable(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelUnavailable(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelUnavailable(f"{path}: must hold a JSON object")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
