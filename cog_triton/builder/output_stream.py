"""Output stream of a step: echoed and logged live, secrets redacted, last lines kept for errors."""

from __future__ import annotations

import collections
import io
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

Echo = Callable[[str], None]
LAST_LINES = 40
LONGEST = 8192
"""Characters of a line; the rest of a longer one becomes further lines."""
_REDRAW_S = 5.0
_REDACTED = "***"


class OutputStream:
    """Reader of a step's output: to `echo`, prefixed by the step's `name`, and to the file `log`.

    `secrets` are redacted in both. `run` is for a thread of its own.
    """

    def __init__(self, name: str, log: Path, echo: Echo, secrets: Sequence[str]) -> None:
        self.last: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        """The last lines, without their ends."""
        self.last_line_at = time.monotonic()
        """Time of the last line, of `time.monotonic`."""
        self.failure: BaseException | None = None
        """Why `run` ended before its source did."""
        self.log = log
        self._name, self._echo = name, echo
        self._secrets = [secret for secret in secrets if secret]

    @property
    def text(self) -> str:
        """The last lines as one text."""
        return "\n".join(self.last)

    def run(self, source: io.TextIOWrapper) -> None:
        """Read until `source` ends or a `failure`, after which the step's next write ends it."""
        try:
            with source, self.log.open("w", encoding="utf-8") as file:
                self._run(source, file)
        except BaseException as error:  # noqa: BLE001  # it is raised in `run_step`
            self.failure = error

    def _run(self, source: io.TextIOWrapper, file: io.TextIOWrapper) -> None:
        """Of a line that is redrawn, as progress bars are, few states are echoed."""
        redrawn, echoed_at = False, 0.0
        for line in self._redacted(source):
            file.write(line)
            file.flush()
            self.last_line_at = time.monotonic()
            if redrawn and self.last:
                self.last.pop()
            redrawn = line.endswith("\r")
            self.last.append(line.rstrip("\r\n"))
            if not redrawn or self.last_line_at - echoed_at >= _REDRAW_S:
                echoed_at = self.last_line_at
                self.say(self.last[-1])

    def _redacted(self, source: io.TextIOWrapper) -> Iterator[str]:
        """Lines, long ones in pieces, none of which ends within a secret."""
        held = max(map(len, self._secrets), default=1) - 1
        kept = ""
        while piece := source.readline(LONGEST):
            line = kept + piece
            for secret in self._secrets:
                line = line.replace(secret, _REDACTED)
            is_whole = len(piece) < LONGEST or piece.endswith(("\n", "\r"))
            cut = len(line) if is_whole else max(0, len(line) - held)
            kept = line[cut:]
            if cut:
                yield line[:cut]
        if kept:
            yield kept

    def say(self, line: str) -> None:
        """Echo a line as one of the step's."""
        self._echo(f"[{self._name}] {line}")
