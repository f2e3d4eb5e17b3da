"""Scenarios: what is broken, under which load, and what has to hold; a YAML file each.

Parsed strictly: an unknown key or a value of another type is an error that names file, key and
rule.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from faults.injections import INJECTIONS

_MOST_ON_ONE, _MOST_OF_SETUP = 20, 5
DIRECTORY = Path(__file__).parent / "scenarios"
ENGINES = ("mock", "openvino")


class ScenarioError(ValueError):
    """A scenario file that cannot be run; names the file, the key and the rule."""


def _ordered(span: tuple[float, float]) -> tuple[float, float]:
    if not 0 <= span[0] <= span[1]:
        raise ValueError("must be [least, most] in seconds, 0 or more")
    return span


def _known(names: tuple[str, ...], what: str) -> AfterValidator:
    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"{what} must be one of {', '.join(names)}")
        return value

    return AfterValidator(check)


Span = Annotated[tuple[float, float], AfterValidator(_ordered)]
Name = Annotated[str, Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Load(_Strict):
    """Streams at once, of all kinds by turns; shares that stream, and that leave."""

    streams: Annotated[int, Field(ge=1, le=256)] = 32
    streamed: Annotated[float, Field(ge=0, le=1)] = 0.5
    leaving: Annotated[float, Field(ge=0, le=1)] = 0.05


class Setup(_Strict):
    """The server that is struck: its ranks, its download, whether its clock can be set, and the
    number of processes that compute beside it, from before its start."""

    ranks: Annotated[int, Field(ge=1, le=4)] = 1
    cut_download: bool = False
    own_clock: bool = False
    busy: Annotated[int, Field(ge=0, le=32)] = 0


class Events(_Strict):
    """Random times, in seconds: how long after READY a fault comes, and how long it lasts."""

    after: Span = (5.1, 6.1)
    lasts: Span = (0, 0)


class Checks(_Strict):
    """Aims: streams that may be lost, end in wrong text, or hang; what may be left.

    `may_end` has, by victim and outcome, the APIs whose streams may end so, and are not lost then.
    `back_within` is seconds until all is served again.
    """

    lost: int = 0
    wrong: int = 0
    hung: int = 0
    leaks: int = 0
    may_end: Mapping[str, Mapping[str, tuple[str, ...]]] = {}
    back_within: Annotated[float, Field(gt=0)] = 120


class Scenario(_Strict):
    """One kind of fault; `victims` are drawn by turns, `share` is how often it comes in a round."""

    report: Name
    fault: Annotated[str, _known(tuple(INJECTIONS), "fault")]
    victims: Annotated[tuple[Name, ...], Field(min_length=1)]
    engines: tuple[Annotated[str, _known(ENGINES, "engine")], ...] = ENGINES
    setup: Setup = Setup()
    load: Load = Load()
    events: Events = Events()
    checks: Checks = Checks()
    share: Annotated[int, Field(ge=1, le=20)] = 1


class Event(_Strict):
    """One fault of a plan; the plan of a random seed is always the same."""

    number: int
    engine: str
    scenario: str
    victim: str
    after: float
    lasts: float


def read(path: Path) -> Scenario:
    """Read a scenario file; raises ScenarioError."""
    try:
        return Scenario.model_validate(yaml.safe_load(path.read_text("utf-8")))
    except yaml.YAMLError as error:
        raise ScenarioError(f"{path}: not YAML: {error}") from error
    except ValidationError as error:
        told = (
            f"{path}: {'.'.join(map(str, item['loc'])) or 'the file'}: {item['msg']}"
            for item in error.errors()
        )
        raise ScenarioError("\n".join(told)) from error


def read_all(only: tuple[str, ...] = ()) -> dict[str, Scenario]:
    """Read all scenarios, or those of these names; raises ScenarioError for an unknown name."""
    found = {path.stem: read(path) for path in sorted(DIRECTORY.glob("*.yaml"))}
    if unknown := sorted(set(only) - set(found)):
        raise ScenarioError(f"--only={','.join(unknown)}: must be of {', '.join(found)}")
    return {name: one for name, one in found.items() if not only or name in only}


def plan(
    scenarios: dict[str, Scenario], engine: str, count: int, seed: int, first: int = 0
) -> list[Event]:
    """Draw `count` faults of an engine: in each round every scenario as often as its share."""
    rng = random.Random(f"{seed} {engine}")
    fits = {name: one for name, one in scenarios.items() if engine in one.engines}
    turns = {name: rng.sample(one.victims, len(one.victims)) for name, one in fits.items()}
    events: list[Event] = []
    while fits and len(events) < count:
        names = [name for name, one in fits.items() for _ in range(one.share)]
        for name in rng.sample(names, len(names)):
            one = fits[name]
            turns[name].append(victim := turns[name].pop(0))
            events.append(
                Event(
                    number=first + len(events),
                    engine=engine,
                    scenario=name,
                    victim=victim,
                    after=round(rng.uniform(*one.events.after), 2),
                    lasts=round(rng.uniform(*one.events.lasts), 2),
                )
            )
    return events[:count]


def lives(scenarios: Mapping[str, Scenario], events: Iterable[Event]) -> list[list[Event]]:
    """Events by the server that they strike, so many at most, those first that are as many."""
    found: list[list[Event]] = []
    begun: dict[str, list[Event]] = {}
    for event in events:
        scenario = scenarios[event.scenario]
        key = repr((scenario.setup, scenario.load))
        begun.setdefault(key, []).append(event)
        if len(begun[key]) == (_MOST_ON_ONE if scenario.setup == Setup() else _MOST_OF_SETUP):
            found.append(begun.pop(key))
    return found + list(begun.values())
