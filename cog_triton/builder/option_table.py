"""The table of options, ``options.yaml``: what each becomes for today's scripts, and for vLLM."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict

Role = Literal["convert", "quantize", "build"]
Verdict = Literal["carries", "changes", "lost", "unneeded"]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Today(_Model):
    """What an option of a script of before 0.17 becomes; see the head of options.yaml."""

    to: str | None = None
    convert: str | None = None
    drop: str | None = None
    only: tuple[str | int | bool | None, ...] | None = None
    refuse: str | None = None
    code: str | None = None


class Target(_Model):
    """What an option becomes for vLLM; see the head of options.yaml."""

    to: str | None = None
    convert: str | None = None
    also: dict[str, Any] = {}
    changes: str | None = None
    lost: str | None = None
    unneeded: str | None = None
    note: str | None = None
    values: dict[str, Target] = {}
    others: Target | None = None
    default: tuple[str | int | bool, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """What the option's line begins with, if no rule by value goes before."""
        for verdict in ("changes", "lost", "unneeded"):
            if getattr(self, verdict) is not None:
                return verdict
        return "carries"

    @property
    def why(self) -> str | None:
        """The reason that goes with `verdict`."""
        return self.changes or self.lost or self.unneeded or self.note

    def of(self, value: object) -> Target:
        """The rule for one value."""
        if word(value) in map(word, self.default):
            return _DEFAULT
        return self.values.get(word(value)) or self.others or self


_DEFAULT = Target(note="as it is by default")
_UNKNOWN = Target(lost="is not known here")


def _named(value: Any) -> Any:
    return {"to": value} if isinstance(value, str) else value


class Row(_Model):
    """One option: `now` for convert_checkpoint.py and trtllm-build, `legacy` for older scripts."""

    now: Annotated[Today | None, BeforeValidator(_named)] = None
    legacy: Annotated[Today | None, BeforeValidator(_named)] = None
    vllm: Annotated[Target, BeforeValidator(_named)] = _UNKNOWN

    def of(self, *, legacy: bool) -> Today | None:
        """What it becomes today, as an option of a legacy script or of a later one."""
        return (legacy and self.legacy) or self.now


def word(value: object) -> str:
    """A value as the table writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


@functools.cache
def table() -> Mapping[str, Mapping[str, Row]]:
    """Rows by section, which is the step or ``config`` or ``serve``, and option."""
    text = (resources.files(__package__) / "options.yaml").read_text("utf-8")
    read = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    del read["reasons"]
    return {
        section: {
            name: Row.model_validate(row) for names, row in rows.items() for name in names.split()
        }
        for section, rows in read.items()
    }


def find(section: str, option: str) -> Row | None:
    """The row of `option`, which may have dashes."""
    return table()[section].get(option.replace("-", "_"))
