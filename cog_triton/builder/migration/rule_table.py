"""Rule table of migrations, from options.yaml: what becomes of each option, by target."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

Target = Literal["vllm", "llmapi"]
TARGETS: tuple[Target, ...] = ("vllm", "llmapi")
Verdict = Literal["carries", "changes", "lost", "unneeded"]
VERDICTS: Mapping[Verdict, str] = {
    "carries": "means the same",
    "changes": "has another meaning, or another way to be said",
    "lost": "cannot be had, or not without more than this config says",
    "unneeded": "was for building the engine, and is not missed",
}


class Rule(BaseModel):
    """What becomes of one option; see the head of options.yaml."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    to: str | None = None
    convert: str | None = Field(None, alias="as")
    also: dict[str, Any] = Field({}, alias="with")
    changes: str | None = None
    lost: str | None = None
    unneeded: str | None = None
    note: str | None = None
    values: dict[str, Rule] = {}
    others: Rule | None = Field(None, alias="else")
    default: tuple[str | int | bool, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """What the option's line begins with, where no rule by value goes before."""
        for verdict in ("changes", "lost", "unneeded"):
            if getattr(self, verdict) is not None:
                return verdict
        return "carries"

    @property
    def why(self) -> str | None:
        """The reason that goes with `verdict`."""
        return self.changes or self.lost or self.unneeded or self.note

    def of(self, value: object) -> Rule:
        """The rule for one value."""
        return self.values.get(word(value)) or self.others or self

    def asks_for_nothing(self, value: object) -> bool:
        """Whether `value` is what there is without the option."""
        return word(value) in map(word, self.default)


_DEFAULT = Rule.model_validate({"note": "as it is by default"})
_UNKNOWN = Rule.model_validate({"lost": "is not known here"})


def word(value: object) -> str:
    """A value as the table writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def find(section: str, option: str, target: Target, value: object) -> Rule:
    """The rule for `value` of `option`, which may have dashes; one of its own if it is unknown."""
    rule = table()[section].get(option.replace("-", "_"), {}).get(target)
    if rule is None:
        return _UNKNOWN
    return _DEFAULT if rule.asks_for_nothing(value) else rule.of(value)


@functools.cache
def table() -> Mapping[str, Mapping[str, Mapping[Target, Rule]]]:
    """Rules by section, option and target."""
    return {
        section: {name: rules for names, rules in _rows(raw) for name in names.split()}
        for section, raw in _raw().items()
    }


@functools.cache
def _raw() -> dict[str, Any]:
    text = (resources.files(__package__) / "options.yaml").read_text("utf-8")
    read = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {section: rows for section, rows in read.items() if section != "defaults"}


def _rows(raw: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[Target, Rule]]]:
    for names, rules in raw.items():
        both = rules.get("both")
        yield names, {target: _rule(rules.get(target, both)) for target in TARGETS}


def _rule(raw: Any) -> Rule:
    by_value = {word(value): _rule(rule) for value, rule in raw.get("values", {}).items()}
    return Rule.model_validate({**raw, "values": by_value})


SECTIONS = {
    "config": "Keys of the build config",
    "convert": "convert_checkpoint.py",
    "quantize": "quantize.py",
    "build": "trtllm-build",
    "serve": "Settings of the server (`tensorrt_llm.args`)",
}


def markdown() -> str:
    """The tables of docs/migrate.md: a row for all options with the same rules."""
    return "\n".join(f"### {title}\n\n{_table(section)}" for section, title in SECTIONS.items())


def _table(section: str) -> str:
    lines = ["| option | vLLM | LLM API |", "|---|---|---|"]
    for names, rules in _rows(_raw()[section]):
        shown = ", ".join(f"`{name}`" for name in names.split())
        other = "so, too" if rules["vllm"] == rules["llmapi"] else _cell(rules["llmapi"])
        lines.append(f"| {shown} | {_cell(rules['vllm'])} | {other} |")
    return "\n".join([*lines, ""])


def _cell(rule: Rule) -> str:
    by_value: dict[str, list[str]] = {}
    for value, one in rule.values.items():
        by_value.setdefault(_said(one), []).append(f"`{value}`")
    parts = [f"{', '.join(values)}: {said}" for said, values in by_value.items()]
    if rule.others is not None:
        parts.append(f"else {_said(rule.others)}")
    elif not rule.values:
        parts.append(_said(rule))
    return "; ".join(parts).replace("|", "\\|")


def _said(rule: Rule) -> str:
    reason = f": {rule.why}" if rule.why else ""
    if rule.to is None:
        return f"{rule.verdict}{reason}"
    argument = "the same" if rule.to == "*" else f"`{rule.to}`"
    return f"{argument}{' changes' if rule.verdict == 'changes' else ''}{reason}"
