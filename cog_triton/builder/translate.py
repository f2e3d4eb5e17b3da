"""Translation of a build config for today's scripts, once, at the entrance.

Its words `quantization`, `kv_cache_dtype` and `tensor_parallel` become arguments of the step that
makes the checkpoint: quantize.py, which reads the model itself, or convert_checkpoint.py.
TensorRT-LLM had ``hf_*_convert.py`` and ``build.py`` until 0.8, then ``convert_checkpoint.py`` and
``trtllm-build``, whose options changed until 0.17: options.yaml has a row for each of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from typing import Literal, NamedTuple

import yaml

from cog_triton.builder.checks import Facts, breaches, text
from cog_triton.builder.config import BuildConfig, StepConfig, checked
from cog_triton.builder.plan import Families, Plan, make_plan
from cog_triton.builder.script_options import (
    MODEL,
    ArgumentValue,
    ScriptOptions,
    Today,
    known_options,
    relative,
    resolved,
    shown,
    table,
)
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

    `refusals` are of a lenient translation only: one for each argument that is left out, with the
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
    config: BuildConfig,
    family: str,
    offers: Callable[[str], bool] = lambda _: False,
    *,
    today: bool = True,
    lenient: bool = False,
) -> Translation:
    """Translate `config` for the scripts of today; the same object if nothing is legacy.

    Args:
        family: the path of the example family, as ``models/core/gpt``.
        offers: whether the family has a script on this machine, which is left as it is then.
        today: false for the scripts of a tree of before 0.18, which are left as they are.
        lenient: leave out what cannot be translated: for a config that is not to be run.

    Raises:
        UnknownArgument: names each argument that cannot be translated, its value and the reason.
        BuildConfigInvalid: what comes out breaks a rule of configs, as world_size can.
    """
    notes: list[str] = []
    if config.model_tar_url is not None and config.weight_format is not None:
        given = repr(config.weight_format)
        notes.append(f"weight_format: {given}: left out: model_tar_url has what it has")
        config = config.model_copy(update={"weight_format": None})
    if config.merge is not None:
        notes.append("merge: left out: the original builder's own mark, which changed nothing")
        config = config.model_copy(update={"merge": None})
    if today and family == "openvino" and len(config.steps()) > 1 and not offers(CONVERT):
        config = _one_step(config, notes)
    if not today or not family.startswith(_TODAY):
        return Translation(config, tuple(notes))
    work = _Work(config.model_id, _steps(config, family, offers), notes)
    for step in work.steps.values():
        work.apply(step)
    work.complete()
    if work.refusals and not lenient:
        raise UnknownArgument("\n".join(work.refusals))
    if not work.refusals:
        work.name_variant()
        if not notes:
            return Translation(config)
    config = _with_steps(config, {step.name: step.config() for step in work.steps.values()})
    return Translation(config, tuple(notes), tuple(work.refusals))


def _with_steps(
    config: BuildConfig,
    steps: Mapping[str, StepConfig],
    where: str = "the translated config",
    without: Collection[str] = (),
) -> BuildConfig:
    """`config` with other steps; `where` begins the error of what breaks a rule then."""
    given = {key: getattr(config, key) for key in config.model_fields_set if key not in without}
    return checked(BuildConfig, {**given, **steps}, where)


def _one_step(config: BuildConfig, notes: list[str]) -> BuildConfig:
    """`config` without the steps that OpenVINO's family had before build: convert and quantize.

    Raises:
        UnknownArgument: names arguments of theirs that build.py has no place for.
    """
    *before, (_, build) = config.steps()
    known = {"model_dir", "output_dir", "dtype", "qformat"}
    if refusals := [
        f"{name}.args.{key}: {shown(value)}: cannot be translated: build.py has no place for it"
        for name, step in before
        for key, value in step.args.items()
        if key not in known and value is not False
    ]:
        raise UnknownArgument("\n".join(refusals))
    steps = {name.partition("_")[0]: step.args for name, step in before}
    weights: ArgumentValue = "stored"
    if "quantize" in steps:
        weights = steps["quantize"].get("qformat", "q8_0")
    elif steps["convert"].get("dtype") == "float16":
        weights = "f16"
    source = steps.get("convert", {}).get("model_dir", MODEL)
    own = {key: value for key, value in build.args.items() if key != "checkpoint_dir"}
    update = {
        "args": {"model_dir": source, "weights": weights, **own},
        "env": {key: value for _, step in config.steps() for key, value in step.env.items()},
    }
    names = [name for name, _ in before]
    notes.append(f"{', '.join(names)}: left out: build.py reads the model itself")
    return _with_steps(config, {"build": build.model_copy(update=update)}, without=names)


_Runs = Literal["legacy", "today", "other", "new"]


class _Given(NamedTuple):
    """An argument as the config has it; `label` is its YAML path."""

    role: str
    label: str
    value: ArgumentValue

    def __str__(self) -> str:
        return f"{self.label}: {shown(self.value)}"


@dataclass
class _Step:
    """A step of the config, `source`, and its new arguments.

    `given` has the arguments by their names with underscores, `origins` what is behind each of
    `args`. `script` is its script of today, with the options `known`; the step ran a ``legacy`` one
    that no longer exists, or runs that of today, or some other; or it is ``new``.
    """

    role: str
    name: str
    source: StepConfig
    runs: _Runs
    script: str
    known: ScriptOptions
    given: Mapping[str, _Given]
    args: dict[str, ArgumentValue] = field(default_factory=dict)
    origins: dict[str, _Given] = field(default_factory=dict)

    def config(self) -> StepConfig:
        """The step of the translated config."""
        if self.runs in ("today", "other"):
            return self.source.model_copy(update={"args": self.args})
        first = {name: self.args[name] for name in _FIRST if name in self.args}
        convert = self.role == "convert"
        today = {"script": CONVERT} if convert else {"executable": BUILD, "script": None}
        return self.source.model_copy(update={**today, "args": {**first, **self.args}})


def _steps(config: BuildConfig, family: str, offers: Callable[[str], bool]) -> dict[str, _Step]:
    """The steps by role; one that converts is new, if build.py read the model itself."""
    scripts = {"convert": f"{family}/{CONVERT}", "quantize": f"quantization/{QUANTIZE}"}

    def made(name: str, source: StepConfig, runs: _Runs) -> _Step:
        role = name.partition("_")[0]
        script = scripts.get(role, BUILD)
        known = known_options(script) or ScriptOptions("", ())
        args = source.args.items()
        given = {k.replace("-", "_"): _Given(role, f"{name}.args.{k}", v) for k, v in args}
        return _Step(role, name, source, runs, script, known, given)

    steps: dict[str, _Step] = {}
    for name, source in config.steps():
        role, script = (
            name.partition("_")[0],
            PurePosixPath(source.script or source.executable).name,
        )
        runs: _Runs = "today" if script == PurePosixPath(scripts.get(role, BUILD)).name else "other"
        if role in _LEGACY and _LEGACY[role].fullmatch(script) and not offers(source.script or ""):
            runs = "legacy"
        steps[role] = made(name, source, runs)
    if steps["build"].runs == "legacy" and "convert" not in steps:
        top = PurePosixPath(relative(config.build.output_dir)).parts[0]
        output_dir = "converted" if top == "checkpoint" else "checkpoint"
        source = config.build.model_copy(update={"output_dir": output_dir, "args": {}})
        return {"convert": made("convert", source, "new"), **steps}
    return steps


@dataclass
class _Work:
    """A translation in progress; steps that have no rows in the table stay as they are."""

    model_id: str
    steps: Mapping[str, _Step]
    notes: list[str]
    refusals: list[str] = field(default_factory=list)

    def apply(self, step: _Step) -> None:
        """Translate every argument of one step."""
        legacy = step.runs == "legacy"
        if step.runs == "new":
            self.notes.append(
                f"{step.name}: {CONVERT} is a new step: build.py read the model itself"
            )
            return
        if legacy:
            now = PurePosixPath(step.script).name
            self.notes.append(f"{step.name}: {step.source.script} -> {now}")
        if len(step.given) < len(step.source.args):
            self.refusals.append(
                f"{step.name}.args: an option is there with dashes and underscores"
            )
        rows = {} if step.runs == "other" else table()[step.role]
        # Some families have what others have lost.
        still = {option.replace("-", "_") for option in step.known.names}
        for name, given in step.given.items():
            row = rows.get(name)
            today = None if row is None else row.of(legacy=legacy)
            if step.role == "convert" and not legacy and name in still:
                today = None
            if today is not None:
                self._become(given, today)
            elif legacy:
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
            try:
                self.move(given, step or given.role, name, _converted(value, today.convert))
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
        new, legacy = convert.runs == "new", build.runs == "legacy"
        read = {*build.args, *(convert.args if new else ())}
        if new and "quantize" in self.steps:
            why = "cannot be translated: quantize.py writes a checkpoint now, for trtllm-build"
            self.refusals.append(f"build.script: 'build.py': {why}")
        if convert.runs == "legacy" and "model_dir" not in convert.args:
            self.refusals.append(f"{convert.name}.args.in-file is missing")
        elif legacy and read.isdisjoint(("model_dir", "meta_ckpt_dir", "checkpoint_dir")):
            self.refusals.append("build.args.model_dir is missing: there would be no weights")
        if convert.runs in ("legacy", "new"):
            self.add("convert", "output_dir", convert.source.output_dir, "output_dir of the step")
            script = PurePosixPath(convert.source.script or "").name
            dtype = "float32" if script == "hf_gpt_convert.py" else "float16"
            self.add("convert", "dtype", dtype, f"the default of {script}")
        if legacy:
            written = convert.source.output_dir
            self.add("build", "checkpoint_dir", written, f"what {convert.name} writes")
            self.add("build", "output_dir", build.source.output_dir, "output_dir of the step")

    def name_variant(self) -> None:
        """Give convert_checkpoint.py the variant of its model that the model's id names.

        It looks for the name in the path of the model's directory, and fails without another word.
        """
        convert = self.steps.get("convert")
        if convert is None or convert.runs not in ("legacy", "today"):
            return
        options = (one.choices for one in convert.known.options if "gpt_variant" in one.names)
        model, variants = self.model_id.lower(), next(options, None)
        named = [word for word in variants or () if word in model]
        if named:
            longest = max(named, key=len)
            self.add("convert", "gpt_variant", longest, "the model's id names it")
        elif variants and convert.runs == "legacy":
            self.add("convert", "gpt_variant", "gpt2", "the default of hf_gpt_convert.py")

    def value(self, role: str, *names: str) -> ArgumentValue:
        """What the config gives for the first of the options `names`; false for nothing."""
        given = self.steps[role].given if role in self.steps else {}
        return next((given[name].value for name in names if name in given), False)

    def number(self, role: str, *names: str) -> int:
        """As `value`, if that is a number; else 1."""
        value = self.value(role, *names)
        return value if isinstance(value, int) and not isinstance(value, bool) else 1

    def move(
        self, given: _Given, role: str, name: str, value: ArgumentValue, why: str = ""
    ) -> None:
        """Turn `given` into the argument `name` of a step."""
        step = self.steps.get(role)
        if step is None:
            self.refuse(given, f"{name} is for the convert step now, and this config has none")
        elif step.known.options and name not in step.known.names:
            self.refuse(given, f"{step.script} has no --{name}{nearest(name, step.known.names)}")
        elif self._set(given, step, name, value):
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

    def add(self, role: str, name: str, value: ArgumentValue, why: str) -> None:
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


def _output_dir(work: _Work, given: _Given) -> None:
    """The directory is output_dir of the step."""
    declared, value = work.steps[given.role].source.output_dir, given.value
    same = isinstance(value, str) and _path(value) == _path(declared)
    work.move(
        given, given.role, "output_dir", value if same else declared, "output_dir of the step"
    )


def _path(value: ArgumentValue) -> PurePosixPath:
    return PurePosixPath(relative(str(value)))


def _model_dir(work: _Work, given: _Given) -> None:
    """It is the output of the convert step, which appended ``<ranks>-gpu``, or the model itself."""
    value, convert = given.value, work.steps["convert"]
    if not isinstance(value, str):
        work.refuse(given, "it is a directory")
    elif convert.runs != "new":
        output_dir = convert.source.output_dir
        roots = {output_dir, work.value("convert", "out_dir", "o")} - {False}
        ranks = work.number("convert", *_CONVERTED_RANKS)
        if _path(value) in {
            path for root in map(_path, roots) for path in (root, root / f"{ranks}-gpu")
        }:
            work.move(given, "build", "checkpoint_dir", output_dir)
        else:
            work.refuse(given, f"{convert.name}.output_dir is {output_dir!r}")
    elif resolved(value, work.model_id, MODEL) == MODEL or relative(value)[:1] == "/":
        work.move(given, "convert", "model_dir", value)
    else:
        work.refuse(given, "it is not the model, and no step before build writes it")


def _max_output_len(work: _Work, given: _Given) -> None:
    """With max_input_len it is max_seq_len today."""
    longest = work.value("build", "max_input_len")
    if type(given.value) is not int or type(longest) is not int:
        work.refuse(given, "max_seq_len is its sum with max_input_len: give both as numbers")
        return
    why = f"max_input_len {longest} + max_output_len {given.value}"
    work.move(given, "build", "max_seq_len", longest + given.value, why)


def _world_size(work: _Work, given: _Given) -> None:
    """It is tensor parallelism, which is all that build.py of gpt has."""
    if work.value("build", "tp_size", "pp_size") is False:
        work.move(given, "convert", "tp_size", given.value)
    elif given.value == work.number("build", "tp_size") * work.number("build", "pp_size"):
        work.drop(given, "tp_size and pp_size say it")
    else:
        work.refuse(given, "it is not tp_size times pp_size")


def _smoothquant(work: _Work, given: _Given) -> None:
    """The weights were smoothed in one step, and the engine used it by a flag of the other."""
    flag = work.value("build", "use_smooth_quant") is not False
    smoothed = work.value("convert", "smoothquant", "sq") is not False
    if not smoothed or (work.steps["build"].runs == "legacy" and not flag):
        work.refuse(given, "it needs smoothquant of convert and use_smooth_quant of build")
    elif given.role == "convert":
        work.move(given, "convert", "smoothquant", given.value)
    else:
        work.drop(given, "smoothquant of the convert step does it")


_CODE: Mapping[str, Callable[[_Work, _Given], None]] = {
    "output_dir": _output_dir,
    "model_dir": _model_dir,
    "max_output_len": _max_output_len,
    "world_size": _world_size,
    "smoothquant": _smoothquant,
}


def _among(value: ArgumentValue, values: Collection[ArgumentValue]) -> bool:
    """Whether `value` is one of `values`, 1 not being true."""
    return any(type(value) is type(other) and value == other for other in values)


_DTYPES = {"fp16": "float16", "fp32": "float32", "bf16": "bfloat16"}


def _converted(value: ArgumentValue, how: str | None) -> ArgumentValue:
    """`value` by the name that a row gives in ``convert``.

    Raises:
        ValueError: says why there is no such value today.
    """
    bare = value is None or value is True
    match how:
        case "plugin":
            return "auto" if bare else value
        case "word":
            return "enable" if bare else "disable" if value is False else value
        case "dtype" if isinstance(value, str):
            return _DTYPES.get(value, value)
        case "paged":
            if not _among(value, (None, True, "enable", False, "disable")):
                raise ValueError("it is enable or disable")
            return "continuous" if value in (False, "disable") else "paged"
        case "weights" if value == "int4_awq":
            raise ValueError("AWQ checkpoints come from quantize.py with qformat int4_awq")
        case "safetensors" if not str(value).endswith(".safetensors"):
            raise ValueError("only a .safetensors file can be read today")
    return value


def spelled_out(config: BuildConfig, family: str, echo: Echo) -> BuildConfig:
    """`config` with its words as arguments of its steps; every one is printed to `echo`.

    The step that makes the checkpoint is added if it is missing. A config without words is
    returned as it is.

    Raises:
        BuildConfigInvalid: a word says other than an argument, or is not for these steps.
        EngineIncompatible: the config's SM is not that of this machine.
    """
    here = sorted(set(visible_gpus())) if config.sm is not None else []
    if here and config.sm not in here:
        raise EngineIncompatible(
            f"sm {config.sm}: an engine is built on the GPU that it is for, and here is"
            f" {', '.join(f'sm_{sm}' for sm in here)}"
        )
    words = [name for name in WORDS if getattr(config, name) is not None]
    if not words:
        return config
    if not family.startswith("models/"):
        raise BuildConfigInvalid(
            f"{words[0]}: is for scripts of TensorRT-LLM since 0.18, and {family} is none"
            " of them: give its steps their own arguments"
        )
    word, cache, parallel = (getattr(config, name) for name in WORDS)
    given = [name for name, _ in config.steps()]
    convert = next((name for name in given if name.startswith("convert")), None)
    other = "quantize" if word == "none" else convert
    if word is not None and other in given:
        raise BuildConfigInvalid(
            f"quantization {word}: the word stands for the whole step: leave {other} out"
        )
    args: dict[str, ArgumentValue]
    if word not in (None, "none") or "quantize" in given:
        name, script, output = "quantize", QUANTIZE, "quantized"
        args = {"qformat": word, "kv_cache_dtype": None if cache == "auto" else cache}
        args["tp_size"] = parallel
    else:
        name, script, output = convert or "convert", CONVERT, "checkpoint"
        known = known_options(f"{family}/{CONVERT}")
        options = ["tp_size"] if known is None else known.names
        if cache == "fp8" or (cache == "int8" and "int8_kv_cache" not in options):
            raise BuildConfigInvalid(
                f"kv_cache_dtype {cache}: {family}/{CONVERT} makes no such cache: quantize.py"
                " does, with quantization fp8, for example"
            )
        args = {
            "int8_kv_cache": True if cache == "int8" else None,
            "ckpt-type": "hf" if "ckpt-type" in options and convert is None else None,
            "tp_size" if "tp_size" in options else "world-size": parallel,
        }
    args = {key: value for key, value in args.items() if value is not None}
    usual: dict[str, ArgumentValue] = {"model_dir": MODEL, "output_dir": output, "dtype": "auto"}
    step = getattr(config, name) or StepConfig(script=script, output_dir=output, args=usual)
    for key, value in args.items():
        has = step.args.get(key, value)
        if (True if has is None else has) != value:
            raise BuildConfigInvalid(
                f"{name}.args.{key}: {shown(has)}: the config's own word says {shown(value)}"
            )
    paths = {"checkpoint_dir": step.output_dir, "output_dir": config.build.output_dir}
    steps = {
        name: _filled(step, args, name, echo),
        "build": _filled(config.build, paths, "build", echo),
    }
    return _with_steps(config, steps, ", ".join(words), without=words)


def _filled(
    step: StepConfig, args: Mapping[str, ArgumentValue], name: str, echo: Echo
) -> StepConfig:
    """`step` with those of `args` that it lacks."""
    for key, value in args.items():
        if key not in step.args:
            echo(f"[config] {name}.args.{key}: {shown(value)}")
    return step.model_copy(update={"args": {**args, **step.args}})
