from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console
from typer import Exit

from cog_triton.errors import EngineCorrupt
from cog_triton.system import terminal
from cog_triton.system.log_format import ConsoleFormatter
from cog_triton.system.printable import printable


def test_control_characters_are_escaped_and_text_is_not() -> None:
    assert printable("größe 日本 a/b.txt") == "größe 日本 a/b.txt"
    assert printable("a\n\x1b[1m\x9b\u202e\ud800") == "a\\n\\x1b[1m\\x9b\\u202e\\ud800"
    assert printable("a\n\tb\r", keep="\n\t") == "a\n\tb\\r"


def test_errors_and_console_logs_cannot_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.StringIO()
    monkeypatch.setattr(terminal, "err", Console(file=written, soft_wrap=True))
    with pytest.raises(Exit), terminal.coded_errors():
        raise EngineCorrupt("x\x1b[2J: broken\nits log")
    assert written.getvalue() == "error: E1306 EngineCorrupt: x\\x1b[2J: broken\nits log\n"
    record = logging.LogRecord("n", logging.INFO, "p", 1, "Unpacking \x1b]0;t\x07", (), None)
    assert "\x1b" not in ConsoleFormatter().format(record)
