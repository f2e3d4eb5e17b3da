"""The build config: YAML, checked once, here."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from cog_triton.build.arguments import ArgumentValue
from cog_triton.errors import BuildConfigInvalid, nearest

# What the builder itself keeps in the work directory.
RESERVED = ("model", "logs", "stamps", "package")
_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
# The seed's name for the conversion step, kept.
_RENAMED = {"convert_to_ft": "convert"}


def _inside_work_dir(value: str) -> str:
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts or path == PurePosixPath("."):
        raise ValueError("must be a relative path inside the work directory")
    return value


def _option_names(value: dict[str, ArgumentValue]) -> dict[str, ArgumentValue]:
    for key in value:
        if not _OPTION.fullmatch(key):
            raise ValueError(f"option name {key!r} must be written without dashes before it")
    texts = [
        text for item in value.values() for text in (item if isinstance(item, list) else [item])
    ]
    if any("\0" in text for text in texts if isinstance(text, str)):
        raise ValueError("a text must not hold the NUL character")
    return value


Text = Annotated[str, StringConstraints(min_length=1)]
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
OutputDir = Annotated[Text, AfterValidator(_inside_work_dir)]
Args = Annotated[dict[str, ArgumentValue], AfterValidator(_option_names)]


class StepConfig(BaseModel):
    """One step: a script of the example family, its arguments, and where its output lies."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    script: FileName
    executable: Literal["python"] = "python"
    output_dir: OutputDir
    args: Args = {}


class BuildConfig(BaseModel):
    """A build: the model, the example family, and up to three steps, run in this order."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model_id: Text
    example_name: FileName
    convert: StepConfig | None = Field(default=None)
    quantize: StepConfig | None = Field(default=None)
    build: StepConfig

    @model_validator(mode="after")
    def _outputs_apart(self) -> BuildConfig:
        """A step's old output is removed before it runs: it must be nobody else's."""
        taken: dict[PurePosixPath, str] = {PurePosixPath(name): "the builder" for name in RESERVED}
        for name, step in self.steps():
            path = PurePosixPath(step.output_dir)
            for other, owner in taken.items():
                if path == other or path in other.parents or other in path.parents:
                    raise ValueError(
                        f"{name}.output_dir {step.output_dir!r} overlaps {str(other)!r} of {owner}"
                    )
            taken[path] = name
        return self

    def steps(self) -> list[tuple[str, StepConfig]]:
        """The steps that are there, by name, in the order they run."""
        named = (("convert", self.convert), ("quantize", self.quantize), ("build", self.build))
        return [(name, step) for name, step in named if step is not None]

    def to_yaml(self) -> str:
        """The config as it is run: equal text for equal configs."""
        value = self.model_dump(mode="json")
        for name in ("convert", "quantize"):
            if value[name] is None:
                del value[name]
        return yaml.safe_dump(value, sort_keys=False)


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice instead of keeping the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} is there twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def load_config(path: Path) -> BuildConfig:
    """Read and check a build config.

    Raises:
        BuildConfigInvalid: names the file and the YAML path, value, rule and nearest valid key.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BuildConfigInvalid(f"{path}: cannot be read: {error}") from error
    return parse_config(text, str(path))


def parse_config(text: str, origin: str) -> BuildConfig:
    """As `load_config`, from the YAML text; `origin` names it in errors."""
    try:
        raw = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise BuildConfigInvalid(f"{origin}: not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise BuildConfigInvalid(f"{origin}: must be a mapping with model_id, example_name, build")
    renamed: dict[str, str] = {}
    for old, new in _RENAMED.items():
        if old in raw:
            if new in raw:
                raise BuildConfigInvalid(f"{origin}: {old} and {new} are one step; give one")
            raw[new] = raw.pop(old)
            renamed[new] = old
    try:
        return BuildConfig.model_validate(raw)
    except ValidationError as error:
        raise BuildConfigInvalid(f"{origin}: {_describe(error, renamed)}") from error


def _describe(error: ValidationError, renamed: dict[str, str]) -> str:
    """One line per mistake: YAML path, value, rule, and the nearest key for an unknown one."""
    lines: dict[str, str] = {}
    for found in error.errors(include_url=False):
        loc = [str(part) for part in found["loc"]]
        kind, value = found["type"], repr(found["input"])
        rule = found["msg"].removeprefix("Value error, ")
        if loc[1:2] == ["args"] and len(loc) > 2:
            # One entry per type the union allows: to the user it is one mistake.
            loc = loc[:3]
            rule = "must be empty, true, false, a number, a text, or a list of numbers and texts"
            value = "" if loc[-1] == "[key]" else value
        if loc and loc[0] in renamed:
            loc[0] = renamed[loc[0]]
        where = ".".join(loc)
        if kind == "missing":
            line = f"{where} is missing"
        elif kind == "extra_forbidden":
            known = list(BuildConfig.model_fields if len(loc) == 1 else StepConfig.model_fields)
            line = f"{where}: unknown key{nearest(loc[-1], known + list(_RENAMED))}"
        elif not where:
            line = rule
        else:
            line = f"{where}: {value[:120]}: {rule}"
        lines.setdefault(where, line)
    return "\n".join(lines.values())
