"""Options of build scripts: values in a config, the recorded options, and what each becomes.

``options.json`` has a line for each script, of TensorRT-LLM and of this package: they need not be
installed, and are not run, for a config to be checked. ``options.yaml`` says what an option becomes
for today's scripts and for vLLM.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict

Scalar = int | float | str
ArgumentValue = bool | Scalar | list[Scalar] | None
Role = Literal["convert", "quantize", "build"]
Verdict = Literal["carries", "changes", "lost", "unneeded"]
MODEL = "model"
"""The model in the work directory, as configs name it."""
MODELS = "models"
"""Where steps find it in the work directory, under its own name."""
_SHOWN_LENGTH = 120
# The original builder's working directory.
_ROOT = PurePosixPath("/src")


def command_line(args: Mapping[str, ArgumentValue]) -> list[str]:
    """The words that `args` stand for, in the order given.

    A key without value and ``true`` pass the bare flag ``--key``, ``false`` leaves it out, a
    list passes its items as separate words; anything else, ``0`` and ``""`` included, is a value.
    """
    words: list[str] = []
    for key, value in args.items():
        if value is not False:
            bare = value is None or value is True
            values = value if isinstance(value, list) else [] if bare else [value]
            words += [f"--{key}", *map(str, values)]
    return words


def shown(value: ArgumentValue) -> str:
    """`value` for a message: one line of limited length."""
    if value is None or isinstance(value, bool):
        return {None: "no value", True: "true", False: "false"}[value]
    return repr(value)[:_SHOWN_LENGTH]


def named(model_id: str) -> str:
    """Where steps find the model in the work directory: ``models/ORG/NAME``.

    Scripts of TensorRT-LLM look for the kind of a model in the name of its directory.
    """
    path = PurePosixPath(model_id.removeprefix("pypi:").partition("==")[0])
    is_path = path.is_absolute() or model_id.startswith((".", "~"))
    parts = [path.name] if is_path or ".." in path.parts else path.parts
    name = "/".join(re.sub(r"[^\w.-]", "-", part) for part in parts)
    return f"{MODELS}/{name.strip('/.') or MODEL}"


def relative(text: str) -> str:
    """``/src/...`` as the path in the work directory that takes its place; else `text`."""
    path = PurePosixPath(text)
    below = path != _ROOT and path.is_relative_to(_ROOT)
    return str(path.relative_to(_ROOT)) if below else text


def resolved(text: str, model_id: str, model: str) -> str:
    """`text` with a legacy path of the model, or of the work directory, replaced."""
    return model if PurePosixPath(text) == _ROOT / "models" / model_id else relative(text)


@dataclass(frozen=True)
class Option:
    """One option; `nargs` and `required` as in argparse, 0 being a bare flag.

    `names` are its long names without dashes, as a config writes them. `type` is ``str``, ``int``
    or ``float``, None for argparse's default; for anything else only the script itself can say
    what it accepts.
    """

    names: tuple[str, ...]
    nargs: int | str | None = None
    type: str | None = None
    choices: tuple[str, ...] | None = None
    required: bool = False
    default: str | None = None


@dataclass(frozen=True)
class ScriptOptions:
    """All that a script accepts, and the file of TensorRT-LLM that it was read from, or blank."""

    source: str
    options: tuple[Option, ...]

    @property
    def names(self) -> list[str]:
        """The long names of all options."""
        return [name for option in self.options for name in option.names]


@functools.cache
def recorded() -> dict[str, ScriptOptions]:
    """The options of all scripts that are recorded.

    A script is a path in TensorRT-LLM's ``examples``, as ``quantization/quantize.py``, one in our
    own families, as ``openvino/build.py``, or the name of a command, as ``trtllm-build``.
    """

    def option(fields: dict[str, Any]) -> Option:
        lists = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
        return Option(**{**fields, **lists})

    return {
        script: ScriptOptions(record["source"], tuple(map(option, record["options"])))
        for script, record in json.loads(_file("options.json")).items()
    }


def _file(name: str) -> str:
    return (resources.files(__package__) / name).read_text("utf-8")


def known_options(script: str) -> ScriptOptions | None:
    """The options of `script`; None if they are not recorded."""
    return recorded().get(script)


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
        if _word(value) in map(_word, self.default):
            return Target(note="as it is by default")
        return self.values.get(_word(value)) or self.others or self


def _word(value: object) -> str:
    """A value as the table writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _named(value: Any) -> Any:
    return {"to": value} if isinstance(value, str) else value


class Row(_Model):
    """One option: `now` for convert_checkpoint.py and trtllm-build, `legacy` for older scripts."""

    now: Annotated[Today | None, BeforeValidator(_named)] = None
    legacy: Annotated[Today | None, BeforeValidator(_named)] = None
    vllm: Annotated[Target, BeforeValidator(_named)] = Target(lost="is not known here")

    def of(self, *, legacy: bool) -> Today | None:
        """What it becomes today, as an option of a legacy script or of a later one."""
        return (legacy and self.legacy) or self.now


@functools.cache
def table() -> Mapping[str, Mapping[str, Row]]:
    """Rows by section, which is the step or ``config`` or ``serve``, and option."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    read = yaml.load(_file("options.yaml"), Loader=loader)
    del read["reasons"]
    return {
        section: {
            name: Row.model_validate(row) for names, row in rows.items() for name in names.split()
        }
        for section, rows in read.items()
    }
