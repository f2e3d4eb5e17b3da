"""Table of what was seen of each operation, for docs/deploy.md."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from clients import Clients


@dataclass
class Row:
    """An operation, how long it took, and what its clients got."""

    operation: str
    seconds: float = 0.0
    seen: str = ""
    clients: Clients | None = None

    def __str__(self) -> str:
        asked = lost = ""
        if self.clients is not None:
            lost = str(len(self.clients.lost))
            asked = str(self.clients.whole + len(self.clients.lost))
        return f"| {self.operation} | {asked} | {lost} | {self.seconds:.0f} s | {self.seen} |"


@dataclass
class Report:
    """Rows in the order of the tests, those that failed included."""

    rows: list[Row] = field(default_factory=list)

    @contextmanager
    def operation(self, name: str, clients: Clients | None = None) -> Iterator[Row]:
        """A row whose seconds are those of the block."""
        row = Row(name, clients=clients)
        self.rows.append(row)
        begun = time.monotonic()
        try:
            yield row
        except BaseException:
            row.seen += " FAILED"
            raise
        finally:
            row.seconds = time.monotonic() - begun
            print(row, *(clients.lost if clients is not None else ()), sep="\n")

    def __str__(self) -> str:
        head = ["| operation | streams | lost | took | seen |", "|---|--:|--:|--:|---|"]
        return "\n".join([*head, *map(str, self.rows)])
