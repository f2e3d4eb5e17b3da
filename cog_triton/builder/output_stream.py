"""Passes on what a step says, while it runs: shown, logged, and its end kept for an error."""

from __future__ import annotations

import collections
import io
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

Echo = Callable[[str], None]
LAST_LINES = 40
LONGEST = 8192
"""Characters of a line; what a longer one has beyond is told as further lines."""
_REDRAW_S = 5.0
_BLOT = "***"


class Relay:
    """To `echo`, prefixed by the step's `name`, and to the file `log`; for a thread of its own.

    `secrets` are blotted out of both.
    """

    def __init__(self, name: str, log: Path, echo: Echo, secrets: Sequence[str]) -> None:
        self.last: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        """The last lines, without their ends."""
        self.heard = time.monotonic()
        """When the last line came."""
        self.failure: BaseException | None = None
        """Why `run` ended before its source did."""
        self._name, self._log, self._echo = name, log, echo
        self._secrets = [secret for secret in secrets if secret]

    @property
    def text(self) -> str:
        """The last lines, as a text."""
        return "\n".join(self.last)

    def run(self, source: io.TextIOWrapper) -> None:
        """Until `source` ends, or `failure`; then the step's next word ends the step."""
        try:
            with source, self._log.open("w", encoding="utf-8") as file:
                self._run(source, file)
        except BaseException as error:  # noqa: BLE001  # it is raised in `run_step`
            self.failure = error

    def _run(self, source: io.TextIOWrapper, file: io.TextIOWrapper) -> None:
        """Of a line that is redrawn, as bars are, few states are told."""
        redrawn, told = False, 0.0
        for line in self._blotted(source):
            file.write(line)
            file.flush()
            self.heard = time.monotonic()
            if redrawn and self.last:
                self.last.pop()
            redrawn = line.endswith("\r")
            self.last.append(line.rstrip("\r\n"))
            if not redrawn or self.heard - told >= _REDRAW_S:
                told = self.heard
                self.tell(self.last[-1])

    def _blotted(self, source: io.TextIOWrapper) -> Iterator[str]:
        """Lines, long ones in pieces, none of which ends within a secret."""
        held = max(map(len, self._secrets), default=1) - 1
        kept = ""
        while piece := source.readline(LONGEST):
            line = kept + piece
            for secret in self._secrets:
                line = line.replace(secret, _BLOT)
            is_whole = len(piece) < LONGEST or piece.endswith(("\n", "\r"))
            cut = len(line) if is_whole else max(0, len(line) - held)
            kept = line[cut:]
            if cut:
                yield line[:cut]
        if kept:
            yield kept

    def tell(self, line: str) -> None:
        """Show a line as one of the step's."""
        self._echo(f"[{self._name}] {line}")
