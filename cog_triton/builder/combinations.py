"""Rules of combinations: what does not go together, in which versions, and why."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import PurePosixPath
from typing import Annotated

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict

from cog_triton.builder import breaches
from cog_triton.builder.breaches import Broken, Facts, Version
from cog_triton.builder.config import BuildConfig
from cog_triton.errors import (
    BuildConfigInvalid,
    EngineIncompatible,
    ModelUnavailable,
    UnknownExample,
    UserError,
)

_ERRORS: dict[str, type[UserError]] = {
    error.code: error
    for error in (BuildConfigInvalid, EngineIncompatible, ModelUnavailable, UnknownExample)
}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


_Version = Annotated[Version | None, BeforeValidator(_version)]


class Rule(BaseModel):
    """One rule; see the head of combinations.yaml."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    what: str
    why: str
    source: str
    since: _Version = None
    until: _Version = None
    error: str = BuildConfigInvalid.code
    engines: bool = False
    clashes: tuple[breaches.Clash, ...] = ()
    kernels: tuple[breaches.Kernel, ...] = ()
    code: str | None = None

    @property
    def error_type(self) -> type[UserError]:
        """What a breach raises."""
        return _ERRORS[self.error]

    @property
    def versions(self) -> str:
        """The versions of TensorRT-LLM that it is for, in words."""
        first, last = (v and f"{v[0]}.{v[1]}" for v in (self.since, self.until))
        return f"since {first}" if first else f"until {last}" if last else "all"

    def broken(self, facts: Facts) -> Iterator[Broken]:
        """What breaks it."""
        if not (self.since or facts.version) <= facts.version <= (self.until or facts.version):
            return
        for clash in self.clashes:
            yield from breaches.clash(facts, clash)
        for kernel in self.kernels:
            yield from breaches.kernel(facts, kernel)
        if self.code is not None:
            find: Callable[[Facts], Iterator[Broken]] = getattr(breaches, self.code)
            yield from find(facts)

    def line(self, broken: Broken) -> str:
        """What a user reads of a breach: value, rule, and the nearest value that holds."""
        return f"{broken} ({self.name}: {self.why})"


@functools.cache
def rules() -> tuple[Rule, ...]:
    """All rules, in the order of their table."""
    text = (resources.files(__package__) / "combinations.yaml").read_text("utf-8")
    read = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tuple(Rule.model_validate(rule) for rule in read)


def breaches_of(facts: Facts) -> Iterator[tuple[Rule, Broken]]:
    """Every breach, with its rule."""
    for rule in rules():
        for broken in rule.broken(facts):
            yield rule, broken


def check_family(config: BuildConfig, family: str) -> None:
    """Refuse a family whose engines are not served, before its arguments are looked at.

    Raises:
        UnknownExample: names it, and the reason.
    """
    for rule, broken in breaches_of(Facts(config, PurePosixPath(family).name)):
        if rule.error_type is UnknownExample:
            raise UnknownExample(rule.line(broken))


def markdown() -> str:
    """The table of docs/build.md."""
    rows = ["| rule | what holds | TensorRT-LLM | why | source |", "|---|---|---|---|---|"]
    rows += [f"| {r.name} | {r.what} | {r.versions} | {r.why} | {r.source} |" for r in rules()]
    return "\n".join(rows) + "\n"
