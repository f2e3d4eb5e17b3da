"""Translation of a build config for today's scripts, once, at the entrance.

Its words `quantization`, `kv_cache_dtype` and `tensor_parallel` become arguments of the step that
makes the checkpoint: quantize.py, which reads the model itself, or convert_checkpoint.py.
TensorRT-LLM had ``hf_*_convert.py`` and ``build.py`` until 0.8, then ``convert_checkpoint.py`` and
``trtllm-build``, whose options changed until 0.17: options.yaml has a row for each of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath

import yaml
from pydantic import ValidationError

from cog_triton.builder.arguments import MODEL, ArgumentValue, relative, resolved, shown
from cog_triton.builder.config import BuildConfig, StepConfig, known_keys
from cog_triton.builder.config_errors import describe
from cog_triton.builder.option_table import Role, Today, table
from cog_triton.builder.plan import Families, Plan, make_plan
from cog_triton.builder.rules import Facts, breaches, text
from cog_triton.builder.script_options import ScriptOptions, known_options
from cog_triton.builder.workspace import Echo
from cog_triton.errors import (
    BuildConfigInvalid,
    EngineIncompatible,
    UnknownArgument,
    UnknownExample,
    nearest,
)
from cog_triton.system.gpus import visible_gpus

CONVERT, QUANTIZE, BUILD = "convert_checkpoint.py", "quantize.py", "trtllm-build"
WORDS = ("quantization", "kv_cache_dtype", "tensor_parallel")
# TensorRT-LLM's examples since 0.18; a tree of before runs the configs of before.
_TODAY = ("models/", "medusa", "redrafter", "eagle")
_LEGACY = {
    "convert": re.compile(r"hf_\w+_convert\.py|convert_hf_\w+_to_ft\.py"),
    "build": re.compile(r"build\.py"),
}
_FIRST = ("model_dir", "meta_ckpt_dir", "checkpoint_dir", "output_dir")
_CONVERTED_RANKS = ("tensor_parallelism", "tp", "tp_size")


@dataclass(frozen=True)
class Translation:
    """The config to run, and a note for each thing that is not as the user wrote it.

    `refusals` are of `translate_leniently` only: one for each argument that is left out, with the
    reason.
    """

    config: BuildConfig
    notes: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        """The notes, and the steps as they are now, as YAML to be copied; nothing without notes."""
        if not self.notes:
            return
        yield from (f"[translate] {note}" for note in self.notes)
        yield "[translate] the steps are now:"
        steps = {
            name: step.model_dump(mode="json", exclude_defaults=True)
            for name, step in self.config.steps()
        }
        yield from yaml.safe_dump(steps, sort_keys=False, width=1000).splitlines()


def planned(config: BuildConfig, echo: Echo) -> Plan:
    """Plan of `config`, translated.

    Raises:
        UnknownExample, UnknownScript, UnknownArgument, BuildConfigInvalid, EngineIncompatible: as
            `translated` and `make_plan`.
    """
    families = Families()
    return make_plan(translated(config, families, echo), families)


def translated(config: BuildConfig, families: Families, echo: Echo) -> BuildConfig:
    """Translate `config` for the scripts that `families` has; every change is printed to `echo`.

    Raises:
        UnknownExample: its family is not there, or its engines are not served.
        EngineIncompatible: it is for another GPU than those of this machine.
        UnknownArgument, BuildConfigInvalid: see `spelled_out` and `translate`.
    """
    family = families.find(config.example_name)
    if unserved := breaches(Facts(config, PurePosixPath(family).name), (text,)):
        raise UnknownExample(str(unserved[0]))
    config = spelled_out(config, family, echo)
    offers = partial(families.offers, family)
    translation = translate(config, family, offers, today=families.is_of_today)
    for line in translation.lines():
        echo(line)
    return translation.config


def translate(
    config: BuildConfig, family: str, offers: Callable[[str], bool], *, today: bool = True
) -> Translation:
    """Translate `config` for the scripts of today; the same object if nothing is legacy.

    Args:
        family: the path of the example family, as ``models/core/gpt``.
        offers: whether the family has a script on this machine, which is left as it is then.
        today: false for the scripts of a tree of before 0.18, which are left as they are.

    Raises:
        UnknownArgument: names each argument that cannot be translated, its value and the reason.
        BuildConfigInvalid: what comes out breaks a rule of configs, as world_size can.
    """
    return _translate(config, family if today else "", offers, lenient=False)


def translate_leniently(config: BuildConfig, family: str) -> Translation:
    """Translate `config` as `translate`, without what cannot be: for one that is not to be run."""
    return _translate(config, family, lambda _: False, lenient=True)


def _translate(
    config: BuildConfig, family: str, offers: Callable[[str], bool], *, lenient: bool
) -> Translation:
    notes: list[str] = []
    if config.model_tar_url is not None and config.weight_format is not None:
        notes.append(
            f"weight_format: {config.weight_format!r}: left out: model_tar_url has what it has"
        )
        config = config.model_copy(update={"weight_format": None})
    if config.merge is not None:
        notes.append("merge: left out: the original builder's own mark, which changed nothing")
        config = config.model_copy(update={"merge": None})
    if family == "openvino" and len(config.steps()) > 1 and not offers(CONVERT):
        config = _one_step(config, notes)
    if not family.startswith(_TODAY):
        return Translation(config, tuple(notes))
    draft = _Draft(config, family, _drafts(config, offers), notes)
    for step in draft.steps.values():
        draft.apply(step)
    draft.complete()
    if draft.refusals and not lenient:
        raise UnknownArgument("\n".join(draft.refusals))
    if not draft.refusals:
        draft.name_variant()
        if not draft.notes:
            return Translation(config)
    steps = {step.name: step.config(config.build) for step in draft.steps.values()}
    config = _with_steps(config, steps, "the translated config")
    return Translation(config, tuple(draft.notes), tuple(draft.refusals))


def _one_step(config: BuildConfig, notes: list[str]) -> BuildConfig:
    """`config` without the steps that OpenVINO's family had before build: convert and quantize.

    Raises:
        UnknownArgument: names arguments of theirs that build.py has no place for.
    """
    convert, quantize = config.convert or config.convert_to_ft, config.quantize
    steps = {name: step for name, step in config.steps() if step is not config.build}
    known = {"model_dir", "output_dir", "dtype", "qformat"}
    refusals = [
        f"{name}.args.{key}: {shown(value)}: cannot be translated: build.py has no place for it"
        for name, step in steps.items()
        for key, value in step.args.items()
        if key not in known and value is not False
    ]
    if refusals:
        raise UnknownArgument("\n".join(refusals))
    weights: ArgumentValue = "stored"
    if quantize is not None:
        weights = quantize.args.get("qformat", "q8_0")
    elif convert is not None and convert.args.get("dtype") == "float16":
        weights = "f16"
    own = {key: value for key, value in config.build.args.items() if key != "checkpoint_dir"}
    source = MODEL if convert is None else convert.args.get("model_dir", MODEL)
    args = {"model_dir": source, "weights": weights, **own}
    env = {key: value for _, step in config.steps() for key, value in step.env.items()}
    notes.append(f"{', '.join(steps)}: left out: build.py reads the model itself")
    build = config.build.model_copy(update={"args": args, "env": env})
    return _with_steps(config, {"build": build}, "the translated config", without=steps)


@dataclass(frozen=True)
class _Given:
    """An argument as the config has it; `label` is its YAML path."""

    role: Role
    label: str
    value: ArgumentValue

    def __str__(self) -> str:
        return f"{self.label}: {shown(self.value)}"


@dataclass
class _Step:
    """A step as the config has it, `source`, None for a new one, and its new arguments.

    `given` has the arguments by their names with underscores, `origins` what is behind each of
    `args`. `legacy` is whether it ran a script that no longer exists.
    """

    role: Role
    name: str
    source: StepConfig | None
    legacy: bool
    output_dir: str
    given: Mapping[str, _Given]
    args: dict[str, ArgumentValue] = field(default_factory=dict)
    origins: dict[str, _Given] = field(default_factory=dict)

    @property
    def has_rows(self) -> bool:
        """Whether the table's rows are for its script."""
        if self.source is None:
            return False
        script = PurePosixPath(self.source.script or "").name
        names = {"convert": CONVERT, "quantize": QUANTIZE}
        return self.legacy or self.source.executable == BUILD or script == names.get(self.role)

    def config(self, build: StepConfig) -> StepConfig:
        """The step of the translated config."""
        first = {name: self.args[name] for name in _FIRST if name in self.args}
        args = {**first, **self.args}
        if self.source is None:
            return StepConfig(
                script=CONVERT,
                output_dir=self.output_dir,
                args=args,
                env=build.env,
                timeout=build.timeout,
            )
        if not self.legacy:
            return self.source.model_copy(update={"args": self.args})
        convert = self.role == "convert"
        today = {"script": CONVERT} if convert else {"executable": BUILD, "script": None}
        return self.source.model_copy(update={**today, "args": args})


def _drafts(config: BuildConfig, offers: Callable[[str], bool]) -> dict[Role, _Step]:
    drafts: dict[Role, _Step] = {}
    for name, step in config.steps():
        role: Role = "convert" if name.startswith("convert") else name  # type: ignore[assignment]
        script, pattern = step.script or "", _LEGACY.get(role)
        legacy = bool(pattern and pattern.fullmatch(PurePosixPath(script).name))
        given = {
            key.replace("-", "_"): _Given(role, f"{name}.args.{key}", value)
            for key, value in step.args.items()
        }
        drafts[role] = _Step(
            role, name, step, legacy and not offers(script), step.output_dir, given
        )
    if drafts["build"].legacy and "convert" not in drafts:
        top = PurePosixPath(relative(config.build.output_dir)).parts[0]
        output_dir = "converted" if top == "checkpoint" else "checkpoint"
        new = _Step("convert", "convert", None, False, output_dir, {})
        drafts = {"convert": new, **drafts}
    return drafts


@dataclass
class _Draft:
    """A translation in progress; steps that have no rows in the table stay as they are."""

    config: BuildConfig
    family: str
    steps: Mapping[Role, _Step]
    notes: list[str]
    refusals: list[str] = field(default_factory=list)

    def apply(self, step: _Step) -> None:
        """Translate every argument of one step."""
        if step.source is None:
            self.notes.append(
                f"{step.name}: {CONVERT} is a new step: build.py read the model itself"
            )
        elif step.legacy:
            now = CONVERT if step.role == "convert" else BUILD
            self.notes.append(f"{step.name}: {step.source.script} -> {now}")
        if step.source is not None and len(step.given) < len(step.source.args):
            self.refusals.append(
                f"{step.name}.args: an option is there with dashes and underscores"
            )
        rows = table()[step.role] if step.has_rows else {}
        for name, given in step.given.items():
            row = rows.get(name)
            today = None if row is None else row.of(legacy=step.legacy)
            if step.role == "convert" and not step.legacy and self._has("convert", name):
                today = None  # some families have what others have lost
            if today is not None:
                self._become(given, today)
            elif step.legacy:
                known = [name for name, row in rows.items() if row.of(legacy=True)]
                self.refuse(given, f"there is no rule for it{nearest(name, known)}")
            else:
                self._set(given, step, given.label.rsplit(".", 1)[-1], given.value)

    def _become(self, given: _Given, today: Today) -> None:
        value = given.value
        if value is False and today.convert not in ("word", "paged"):
            self.drop(given, "false left it out")
        elif today.code is not None:
            _CODE[today.code](self, given)
        elif today.to is not None:
            step, _, name = today.to.rpartition(".")
            role = next((role for role in self.steps if role == step), given.role)
            try:
                self.move(given, role, name, _CONVERSIONS[today.convert](value))
            except ValueError as error:
                self.refuse(given, str(error))
        elif today.drop and (today.only is None or _among(value, today.only)):
            self.drop(given, today.drop)
        else:
            self.refuse(given, str(today.refuse or today.drop))

    def complete(self) -> None:
        """Add what the legacy scripts did by default, and refuse what cannot be completed."""
        convert, build = self.steps.get("convert"), self.steps["build"]
        if self.refusals or convert is None:
            return
        if convert.source is None and self.config.quantize is not None:
            self.refusals.append(
                "build.script: 'build.py': cannot be translated: it reads the model, and"
                " quantize.py writes a checkpoint now, for trtllm-build"
            )
        if convert.legacy and "model_dir" not in convert.args:
            self.refusals.append(f"{convert.name}.args.in-file is missing")
        elif build.legacy and not {"model_dir", "meta_ckpt_dir", "checkpoint_dir"} & {
            *build.args,
            *(convert.args if convert.source is None else ()),
        }:
            self.refusals.append(
                "build.args.model_dir is missing: the engine would have no weights"
            )
        if convert.legacy or convert.source is None:
            self.add("convert", "output_dir", convert.output_dir, "output_dir of the step")
            script = PurePosixPath((convert.source or self.config.build).script or "").name
            dtype = "float32" if script == "hf_gpt_convert.py" else "float16"
            self.add("convert", "dtype", dtype, f"the default of {script}")
        if build.legacy:
            self.add("build", "checkpoint_dir", convert.output_dir, f"what {convert.name} writes")
            self.add("build", "output_dir", build.output_dir, "output_dir of the step")

    def name_variant(self) -> None:
        """Give convert_checkpoint.py the variant of its model that the model's id names.

        It looks for the name in the path of the model's directory, and fails without another word.
        """
        convert, known = self.steps.get("convert"), self._known("convert")
        if convert is None or known is None or not convert.has_rows:
            return
        for option in known.options:
            if option.names == ("gpt_variant",):
                variants = sorted(option.choices or (), key=len, reverse=True)
                model = self.config.model_id.lower()
                named = next((word for word in variants if word in model), None)
                if named is not None:
                    self.add("convert", "gpt_variant", named, "the model's id names it")
                elif convert.legacy:
                    self.add("convert", "gpt_variant", "gpt2", "the default of hf_gpt_convert.py")

    def value(self, role: Role, *names: str) -> ArgumentValue:
        """What the config gives for the first of the options `names`; false for nothing."""
        given = self.steps[role].given if role in self.steps else {}
        return next((given[name].value for name in names if name in given), False)

    def number(self, role: Role, *names: str) -> int:
        """As `value`, if that is a number; else 1."""
        value = self.value(role, *names)
        return value if isinstance(value, int) and not isinstance(value, bool) else 1

    def move(
        self, given: _Given, role: Role, name: str, value: ArgumentValue, why: str = ""
    ) -> None:
        """Turn `given` into the argument `name` of a step."""
        step, known = self.steps.get(role), self._known(role)
        if step is None:
            self.refuse(given, f"{name} is for the convert step now, and this config has none")
            return
        if known is not None and name not in known.names:
            self.refuse(given, f"{self._script(role)} has no --{name}{nearest(name, known.names)}")
            return
        if not self._set(given, step, name, value):
            return
        target = name if role == given.role else f"{step.name}.args.{name}"
        because = f" ({why})" if why else ""
        if value != given.value:
            self.notes.append(f"{given} -> {target}: {shown(value)}{because}")
        elif given.label != f"{step.name}.args.{target}":
            self.notes.append(f"{given.label} -> {target}{because}")

    def drop(self, given: _Given, why: str) -> None:
        self.notes.append(f"{given}: left out: {why}")

    def refuse(self, given: _Given, why: str) -> None:
        self.refusals.append(f"{given}: cannot be translated: {why}")

    def add(self, role: Role, name: str, value: ArgumentValue, why: str) -> None:
        """Add an argument that the config left to the legacy script, unless it is given."""
        step = self.steps[role]
        if name not in step.args:
            step.args[name] = value
            self.notes.append(f"{step.name}.args.{name}: {shown(value)}: added: {why}")

    def _set(self, given: _Given, step: _Step, name: str, value: ArgumentValue) -> bool:
        origin = step.origins.setdefault(name, given)
        if origin is given:
            step.args[name] = value
        elif step.args[name] == value:
            self.drop(given, f"{origin.label} says it already")
        else:
            self.refuse(given, f"{origin} says otherwise")
        return origin is given

    def _script(self, role: Role) -> str:
        names = {"convert": f"{self.family}/{CONVERT}", "quantize": f"quantization/{QUANTIZE}"}
        return names.get(role, BUILD)

    def _known(self, role: Role) -> ScriptOptions | None:
        return known_options(self._script(role))

    def _has(self, role: Role, name: str) -> bool:
        known = self._known(role)
        return known is not None and name in {each.replace("-", "_") for each in known.names}


def _output_dir(draft: _Draft, given: _Given) -> None:
    """The directory is output_dir of the step."""
    declared, value = draft.steps[given.role].output_dir, given.value
    same = isinstance(value, str) and PurePosixPath(relative(value)) == PurePosixPath(
        relative(declared)
    )
    why = "output_dir of the step"
    draft.move(given, given.role, "output_dir", value if same else declared, why)


def _model_dir(draft: _Draft, given: _Given) -> None:
    """It is the output of the convert step, which appended ``<ranks>-gpu``, or the model itself."""
    value, convert = given.value, draft.steps["convert"]
    if not isinstance(value, str):
        draft.refuse(given, "it is a directory")
    elif convert.source is not None:
        roots = {convert.output_dir, draft.value("convert", "out_dir", "o")} - {False}
        ranks = draft.number("convert", *_CONVERTED_RANKS)
        written = [PurePosixPath(relative(str(root))) for root in roots]
        if PurePosixPath(relative(value)) in {*written, *(r / f"{ranks}-gpu" for r in written)}:
            draft.move(given, "build", "checkpoint_dir", convert.output_dir)
        else:
            draft.refuse(given, f"{convert.name}.output_dir is {convert.output_dir!r}")
    elif resolved(value, draft.config.model_id, MODEL) == MODEL or relative(value)[:1] == "/":
        draft.move(given, "convert", "model_dir", value)
    else:
        draft.refuse(given, "it is not the model, and no step before build writes it")


def _max_output_len(draft: _Draft, given: _Given) -> None:
    """With max_input_len it is max_seq_len today."""
    longest = draft.value("build", "max_input_len")
    if type(given.value) is not int or type(longest) is not int:
        draft.refuse(given, "max_seq_len is its sum with max_input_len: give both as numbers")
        return
    why = f"max_input_len {longest} + max_output_len {given.value}"
    draft.move(given, "build", "max_seq_len", longest + given.value, why)


def _world_size(draft: _Draft, given: _Given) -> None:
    """It is tensor parallelism, which is all that build.py of gpt has."""
    if draft.value("build", "tp_size", "pp_size") is False:
        draft.move(given, "convert", "tp_size", given.value)
    elif given.value == draft.number("build", "tp_size") * draft.number("build", "pp_size"):
        draft.drop(given, "tp_size and pp_size say it")
    else:
        draft.refuse(given, "it is not tp_size times pp_size")


def _parallel_build(draft: _Draft, given: _Given) -> None:
    """One worker process for each rank."""
    parts = draft.number("build", "tp_size") * draft.number("build", "pp_size")
    converted = draft.number("convert", *_CONVERTED_RANKS)
    ranks = max(draft.number("build", "world_size"), parts, converted)
    if ranks > 1:
        draft.move(given, "build", "workers", ranks, "one for each rank")
    else:
        draft.drop(given, "the engine has one rank")


def _smoothquant(draft: _Draft, given: _Given) -> None:
    """The weights were smoothed, but only the build step's flag made the engine use it."""
    if draft.steps["build"].legacy and draft.value("build", "use_smooth_quant") is False:
        draft.refuse(given, "build.args has no use_smooth_quant, so the engine was not quantized")
    else:
        draft.move(given, "convert", "smoothquant", given.value)


def _use_smooth_quant(draft: _Draft, given: _Given) -> None:
    """The convert step does all of it today."""
    if draft.value("convert", "smoothquant", "sq") is not False:
        draft.drop(given, "smoothquant of the convert step does it")
    else:
        draft.refuse(given, "the convert step needs smoothquant, a number from 0 to 1")


_CODE: Mapping[str, Callable[[_Draft, _Given], None]] = {
    "output_dir": _output_dir,
    "model_dir": _model_dir,
    "max_output_len": _max_output_len,
    "world_size": _world_size,
    "parallel_build": _parallel_build,
    "smoothquant": _smoothquant,
    "use_smooth_quant": _use_smooth_quant,
}


def _among(value: ArgumentValue, values: Sequence[ArgumentValue]) -> bool:
    """Whether `value` is one of `values`, 1 not being true."""
    return any(type(value) is type(other) and value == other for other in values)


def _is_bare(value: ArgumentValue) -> bool:
    return value is None or value is True


def _kv_cache(value: ArgumentValue) -> ArgumentValue:
    if not _among(value, (None, True, "enable", False, "disable")):
        raise ValueError("it is enable or disable")
    return "continuous" if value in (False, "disable") else "paged"


def _weights(value: ArgumentValue) -> ArgumentValue:
    if value == "int4_awq":
        raise ValueError("AWQ checkpoints come from quantize.py with qformat int4_awq")
    return value


def _safetensors(value: ArgumentValue) -> ArgumentValue:
    if not isinstance(value, str) or not value.endswith(".safetensors"):
        raise ValueError("only a .safetensors file can be read today")
    return value


_DTYPES = {"fp16": "float16", "fp32": "float32", "bf16": "bfloat16"}
_CONVERSIONS: Mapping[str | None, Callable[[ArgumentValue], ArgumentValue]] = {
    None: lambda value: value,
    "plugin": lambda value: "auto" if _is_bare(value) else value,
    "word": lambda value: "disable" if value is False else "enable" if _is_bare(value) else value,
    "paged": _kv_cache,
    "dtype": lambda value: _DTYPES.get(value, value) if isinstance(value, str) else value,
    "weights": _weights,
    "safetensors": _safetensors,
}
"""By the names that rows give in ``as``; ValueError says why there is no such value today."""


def _with_steps(
    config: BuildConfig, steps: dict[str, StepConfig], where: str, without: Collection[str] = ()
) -> BuildConfig:
    """`config` with other steps; `where` begins the error of what breaks a rule then."""
    given = {key: getattr(config, key) for key in config.model_fields_set if key not in without}
    try:
        return BuildConfig(**{**given, **steps})
    except ValidationError as error:
        raise BuildConfigInvalid(f"{where}: {describe(error, known_keys())}") from None


def spelled_out(config: BuildConfig, family: str, echo: Echo) -> BuildConfig:
    """`config` with its words as arguments of its steps; every one is printed to `echo`.

    The step that makes the checkpoint is added if it is missing. A config without words is
    returned as it is.

    Raises:
        BuildConfigInvalid: a word says other than an argument, or is not for these steps.
        EngineIncompatible: the config's SM is not that of this machine.
    """
    words = {name: value for name in WORDS if (value := getattr(config, name)) is not None}
    here = sorted(set(visible_gpus())) if config.sm is not None else []
    if here and config.sm not in here:
        raise EngineIncompatible(
            f"sm {config.sm}: an engine is built on the GPU that it is for, and here is"
            f" {', '.join(f'sm_{sm}' for sm in here)}"
        )
    if not words:
        return config
    if not family.startswith("models/"):
        raise BuildConfigInvalid(
            f"{next(iter(words))}: is for scripts of TensorRT-LLM since 0.18, and {family} is none"
            " of them: give its steps their own arguments"
        )
    name, step, args = _checkpoint_step(config, family)
    steps = {
        name: _filled(step, args, name, echo),
        "build": _filled(
            config.build,
            {"checkpoint_dir": step.output_dir, "output_dir": config.build.output_dir},
            "build",
            echo,
            only_missing=True,
        ),
    }
    return _with_steps(config, steps, ", ".join(words), without=words)


def _checkpoint_step(
    config: BuildConfig, family: str
) -> tuple[str, StepConfig, dict[str, ArgumentValue]]:
    """The step that makes the checkpoint: its key, itself or a new one, and what to fill in."""
    word, cache = config.quantization, config.kv_cache_dtype
    convert = next((n for n in ("convert", "convert_to_ft") if getattr(config, n)), None)
    if word not in (None, "none") and convert is not None:
        raise BuildConfigInvalid(
            f"quantization {word}: quantize.py reads the model itself: leave {convert} out"
        )
    if word == "none" and config.quantize is not None:
        raise BuildConfigInvalid("quantization none: leave the quantize step out, or the word")
    args: dict[str, ArgumentValue] = {}
    if config.quantize is not None or word not in (None, "none"):
        name = "quantize"
        step = config.quantize or _new(QUANTIZE, "quantized")
        args |= {} if word is None else {"qformat": word}
        args |= {} if cache in (None, "auto") else {"kv_cache_dtype": cache}
        parallel = "tp_size"
    else:
        name = convert or "convert"
        step = getattr(config, name) or _new(CONVERT, "checkpoint")
        known = known_options(f"{family}/{CONVERT}")
        options = [] if known is None else known.names
        if cache == "fp8" or (cache == "int8" and "int8_kv_cache" not in options):
            raise BuildConfigInvalid(
                f"kv_cache_dtype {cache}: {family}/{CONVERT} makes no such cache: quantize.py"
                " does, with quantization fp8, for example"
            )
        args |= {"int8_kv_cache": True} if cache == "int8" else {}
        args |= {"ckpt-type": "hf"} if "ckpt-type" in options and convert is None else {}
        parallel = "tp_size" if "tp_size" in options or not options else "world-size"
    if config.tensor_parallel is not None:
        args[parallel] = config.tensor_parallel
    return name, step, args


def _new(script: str, output_dir: str) -> StepConfig:
    args: dict[str, ArgumentValue] = {"model_dir": MODEL, "output_dir": output_dir, "dtype": "auto"}
    return StepConfig(script=script, output_dir=output_dir, args=args)


def _filled(
    step: StepConfig,
    args: dict[str, ArgumentValue],
    name: str,
    echo: Echo,
    *,
    only_missing: bool = False,
) -> StepConfig:
    """`step` with `args`; what it has already must be the same, unless it is left alone then."""
    for key, value in args.items():
        given = step.args.get(key)
        if key not in step.args:
            echo(f"[config] {name}.args.{key}: {shown(value)}")
        elif not only_missing and (True if given is None else given) != value:
            raise BuildConfigInvalid(
                f"{name}.args.{key}: {shown(given)}: the config's own word says {shown(value)}"
            )
    return step.model_copy(update={"args": {**args, **step.args}})
