"""Scenarios: what is broken, under which load, and what has to hold; rows of scenarios.yaml.

Parsed strictly: an unknown key or a value of another type is an error that names file, key and
rule.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from faults.ledger import Account
from faults.strikes import NOBODY, STRIKES

_MOST, _MOST_OF_SETUP = 20, 5
"""Faults of one server; fewer of one with a setup, so that a short run has all kinds."""
FILE = Path(__file__).with_name("scenarios.yaml")


class ScenarioError(ValueError):
    """Scenarios that cannot be run; names the file, the key and the rule."""


def _ordered(span: tuple[float, float]) -> tuple[float, float]:
    if not 0 <= span[0] <= span[1]:
        raise ValueError("must be [least, most] in seconds, 0 or more")
    return span


def _known(names: Iterable[str]) -> AfterValidator:
    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return value

    return AfterValidator(check)


Span = Annotated[tuple[float, float], AfterValidator(_ordered)]
Name = Annotated[str, Field(min_length=1)]


class Scenario(BaseModel):
    """One kind of fault; `victims` are drawn by turns, `share` is how often it comes in a round.

    The load is `streams` at once, of all kinds by turns; `streamed` and `leaving` are the shares
    that stream, and that leave. A fault comes `after` seconds from READY, and lasts some. The
    server may have a clock that can be set, or run as images do, with `busy` processes that compute
    beside it. `may_end` has, by victim and outcome, the APIs whose streams may end so; all is
    served again within `back_within` seconds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    report: Name
    fault: Annotated[str, _known(STRIKES)]
    victims: Annotated[tuple[Name, ...], Field(min_length=1)] = (NOBODY,)
    share: Annotated[int, Field(ge=0, le=20)] = 1
    streams: Annotated[int, Field(ge=1, le=256)] = 32
    streamed: Annotated[float, Field(ge=0, le=1)] = 0.5
    leaving: Annotated[float, Field(ge=0, le=1)] = 0.05
    after: Span = (5.1, 6.1)
    lasts: Span = (0, 0)
    own_clock: bool = False
    as_image: bool = False
    busy: Annotated[int, Field(ge=0, le=32)] = 0
    may_end: Mapping[str, Mapping[str, tuple[str, ...]]] = {}
    back_within: Annotated[float, Field(gt=0)] = 120

    @property
    def setup(self) -> tuple[object, ...]:
        """What a server and its load are started with; scenarios with the same share a server."""
        load = self.streams, self.streamed, self.leaving
        return self.own_clock, self.as_image, self.busy, load

    def missed(self, account: Account) -> list[str]:
        """Aims that a strike has missed."""
        counts = {"lost": account.lost, "wrong text": account.wrong, "hung": account.hung}
        counts |= {f"{name} left": value for name, value in account.held.items()}
        found = [f"{value} {name}" for name, value in counts.items() if value]
        if account.back_s is None or account.back_s > self.back_within:
            found.append(f"back after {account.back_s} s, not {self.back_within:g} s")
        return found


class Event(NamedTuple):
    """One fault of a plan; the plan of a random seed is always the same."""

    number: int
    engine: str
    scenario: str
    victim: str
    after: float
    lasts: float


def read(path: Path = FILE, only: tuple[str, ...] = ()) -> dict[str, Scenario]:
    """Read all scenarios, or those of these names; raises ScenarioError."""
    try:
        found = TypeAdapter(dict[str, Scenario]).validate_python(
            yaml.safe_load(path.read_text("utf-8"))
        )
    except yaml.YAMLError as error:
        raise ScenarioError(f"{path}: not YAML: {error}") from error
    except ValidationError as error:
        lines = (
            f"{path}: {'.'.join(map(str, item['loc'])) or 'the file'}: {item['msg']}"
            for item in error.errors()
        )
        raise ScenarioError("\n".join(lines)) from error
    if unknown := sorted(set(only) - set(found)):
        raise ScenarioError(f"--only={','.join(unknown)}: must be of {', '.join(found)}")
    return {name: one for name, one in found.items() if not only or name in only}


def plan(scenarios: Mapping[str, Scenario], engine: str, count: int, seed: int) -> list[Event]:
    """Draw `count` faults of an engine: in each round every scenario as often as its share."""
    rng = random.Random(f"{seed} {engine}")
    turns = {name: rng.sample(one.victims, len(one.victims)) for name, one in scenarios.items()}
    names = [name for name, one in scenarios.items() for _ in range(one.share)]
    events: list[Event] = []
    while names and len(events) < count:
        for name in rng.sample(names, len(names)):
            turns[name].append(victim := turns[name].pop(0))
            events.append(_event(rng, len(events), engine, name, victim, scenarios[name]))
    return events[:count]


def stops(scenarios: Mapping[str, Scenario], engine: str, seed: int) -> list[Event]:
    """Every scenario that ends the server, with each of its victims."""
    rng = random.Random(f"{seed} {engine}")
    ends = {name: one for name, one in scenarios.items() if STRIKES[one.fault].ends}
    pairs = [(name, victim, one) for name, one in ends.items() for victim in one.victims]
    return [_event(rng, number, engine, *pair) for number, pair in enumerate(pairs)]


def _event(
    rng: random.Random, number: int, engine: str, name: str, victim: str, of: Scenario
) -> Event:
    after, lasts = (round(rng.uniform(*span), 2) for span in (of.after, of.lasts))
    return Event(number, engine, name, victim, after, lasts)


def lives(scenarios: Mapping[str, Scenario], events: Iterable[Event]) -> list[list[Event]]:
    """Events by the server that they strike, so many at most, those first that are as many."""
    found: list[list[Event]] = []
    begun: dict[object, list[Event]] = {}
    for event in events:
        of = scenarios[event.scenario]
        begun.setdefault(key := (event.engine, of.setup), []).append(event)
        if len(begun[key]) == (_MOST_OF_SETUP if of.own_clock or of.busy else _MOST):
            found.append(begun.pop(key))
    return found + list(begun.values())
