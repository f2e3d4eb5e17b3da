"""Records of a run: a line of JSON for the run, and one for each fault once it is over."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from faults.scenario import Event


class Header(BaseModel):
    """What a run was of; a run is resumed only with the same."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int
    faults: dict[str, int]
    """By engine."""
    only: tuple[str, ...]
    commit: str
    machine: str
    date: str

    def fits(self, other: Header) -> bool:
        """Whether both are of one plan, at whatever commit."""
        mine, its = ((one.seed, [*one.faults.items()], one.only) for one in (self, other))
        return mine == its

    @property
    def total(self) -> int:
        """Planned faults of all engines."""
        return sum(self.faults.values())


class Record(BaseModel):
    """What became of one fault: streams by outcome, seconds, and what is held beyond before."""

    model_config = ConfigDict(extra="forbid")

    event: Event
    commit: str = ""
    server: int = -1
    """Number of the first event that struck the same server."""
    in_flight: int = 0
    lost: int = 0
    hung: int = 0
    wrong: int = 0
    refused: int = 0
    ends: Counter[str] = Counter()
    kinds: dict[str, Counter[str]] = {}
    """Outcomes of the streams in flight, by kind of request."""
    back_s: float | None = None
    """From the end of the fault until READY and all streams flow again; None if never."""
    processes: int = 0
    shared_memory: int = 0
    ports: int = 0
    descriptors: int = 0
    engine_requests: int = 0
    memory_mb: float = 0.0
    problems: list[str] = []

    @property
    def leaks(self) -> int:
        """Processes, files of shared memory, ports, descriptors and requests that were left."""
        held = self.processes + self.shared_memory + self.ports + self.descriptors
        return held + self.engine_requests


class RecordsError(ValueError):
    """A file of records that cannot be gone on with; names it and the rule."""


class Records:
    """A file of records; each is written as soon as it is added."""

    def __init__(self, path: Path, header: Header, resume: bool) -> None:
        """Begin a file, or go on with one; raises RecordsError for one of another plan."""
        self.path, self.header = path, header
        self.all: list[Record] = []
        if resume and path.exists():
            self._read()
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(header.model_dump_json() + "\n")

    def _read(self) -> None:
        first, *lines = self.path.read_text().splitlines()
        try:
            header = Header.model_validate_json(first)
            self.all = [Record.model_validate_json(line) for line in lines]
        except ValidationError as error:
            raise RecordsError(f"{self.path}: is no file of records: {error}") from error
        if not header.fits(self.header):
            counts = ",".join(map(str, header.faults.values()))
            raise RecordsError(
                f"{self.path}: --resume needs the arguments of its run: --seed={header.seed}"
                f" --faults={counts} --engine={','.join(header.faults)}"
            )

    def add(self, record: Record) -> None:
        """Append a record, of this run's commit."""
        record.commit = self.header.commit
        self.all.append(record)
        with self.path.open("a") as file:
            file.write(record.model_dump_json() + "\n")

    @property
    def done(self) -> set[int]:
        """Numbers of the events that have a record."""
        return {record.event.number for record in self.all}
