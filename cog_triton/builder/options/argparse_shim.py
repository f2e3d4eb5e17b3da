"""Argparse shim: runs a script until it reads its command line, and writes its parser as JSON.

``python argparse_shim.py SCRIPT RESULT``, by path and in the interpreter of the script, which need
not have this package: only the standard library is used. The script believes that it was called
with ``--help``. At its first look at the command line through argparse, RESULT gets the parser as
JSON and the process ends; a script that reads it otherwise prints its help. Until then it may
write in the directory of temporary files only, and may neither start processes nor connect.
"""

from __future__ import annotations

import argparse
import enum
import json
import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from typing import Any, TextIO

_MOST_CHOICES = 1000
_PLAIN_TYPES = {None: None, str: "str", int: "int", float: "float"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Audit events, and which of their arguments are paths that they change.
_CHANGES = {
    "os.chmod": slice(1),
    "os.chown": slice(1),
    "os.link": slice(1, 2),
    "os.mkdir": slice(1),
    "os.remove": slice(1),
    "os.rename": slice(2),
    "os.rmdir": slice(1),
    "os.symlink": slice(1, 2),
    "os.truncate": slice(1),
    "os.utime": slice(1),
}
_REFUSED = (
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.kill",
    "os.killpg",
    "os.posix_spawn",
    "os.system",
    "socket.bind",
    "socket.connect",
    "socket.sendto",
    "subprocess.Popen",
)


def describe(parser: argparse.ArgumentParser, complete: bool) -> dict[str, Any]:
    """What `parser` accepts; `complete` if it refuses what it does not know."""
    stops = (argparse._HelpAction, argparse._VersionAction)
    return {
        "complete": complete,
        "abbreviations": parser.allow_abbrev,
        "actions": [_action(parser, a) for a in parser._actions if not isinstance(a, stops)],
    }


def _action(parser: argparse.ArgumentParser, action: argparse.Action) -> dict[str, Any]:
    # For None argparse has a function registered, which only passes the text on.
    kind: Any = action.type
    if kind is not None:
        kind = parser._registry_get("type", kind, kind)
    choices = action.choices
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        # It takes the value of a member, whatever the member is called.
        choices = choices or list(kind)
        kind = str if all(isinstance(member.value, str) for member in kind) else kind
    try:
        plain = _PLAIN_TYPES[kind]
    except (KeyError, TypeError):
        plain = str(getattr(kind, "__qualname__", type(kind).__qualname__)) + "()"
    return {
        "names": list(action.option_strings),
        "label": str(action.metavar or action.dest),
        "nargs": action.nargs,
        "type": plain,
        "choices": _choices(choices),
        "required": bool(action.required),
        "default": None if action.default is None else _text(action.default),
    }


def _choices(choices: Any) -> list[str] | None:
    """Choices as text; None if there are none, or none that can be listed.

    A choice that is None is the default, which no text on a command line means.
    """
    try:
        if len(choices) > _MOST_CHOICES:
            return None
        return [_text(choice) for choice in choices if choice is not None]
    except TypeError:
        return None


def _text(value: Any) -> str:
    """How the command line writes `value`."""
    return str(value.value if isinstance(value, enum.Enum) else value)


def _catch_parsers(result: TextIO) -> None:
    def catching(original: Callable[..., Any], complete: bool) -> Callable[..., Any]:
        def parse(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
            # Libraries parse lists of their own, as for defaults: not the command line.
            if args is not None and list(args) != sys.argv[1:]:
                return original(parser, args, namespace)
            json.dump(describe(parser, complete), result)
            result.flush()
            os._exit(0)  # nothing of the script may run any more, its exit handlers included

        return parse

    for name in ("parse_args", "parse_intermixed_args"):
        method = getattr(argparse.ArgumentParser, name)
        setattr(argparse.ArgumentParser, name, catching(method, True))
    for name in ("parse_known_args", "parse_known_intermixed_args"):
        method = getattr(argparse.ArgumentParser, name)
        setattr(argparse.ArgumentParser, name, catching(method, False))


def _guard(allowed: str) -> None:
    def is_allowed(path: Any) -> bool:
        if isinstance(path, int):
            return True
        real = os.path.realpath(os.fsdecode(path))
        return real in (os.devnull, allowed) or real.startswith(allowed + os.sep)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            changed = args[:1] if (args[2] or 0) & _WRITING else ()
        elif event in _CHANGES:
            changed = args[_CHANGES[event]]
        elif event in _REFUSED:
            raise PermissionError(f"{event} before the command line is read")
        else:
            return
        for path in changed:
            if not is_allowed(path):
                raise PermissionError(f"change of {path} before the command line is read")

    sys.addaudithook(hook)


def main(script: str, result: str) -> None:
    # Looked up before the guard: it is found by writing to it.
    allowed = os.path.realpath(tempfile.gettempdir())
    file = open(result, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    sys.argv = [script, "--help"]
    sys.path[0] = os.path.dirname(script)  # noqa: PTH120
    sys.dont_write_bytecode = True
    _catch_parsers(file)
    _guard(allowed)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
