"""Upgrade of a build config, once, at the entrance: its words and legacy options become today's.

`quantization`, `kv_cache_dtype` and `tensor_parallel` are checked together against the SM, and fill
in arguments of the step that makes the checkpoint: quantize.py, which reads the model itself, or
convert_checkpoint.py. TensorRT-LLM had ``hf_*_convert.py`` and ``build.py`` until 0.8, then
``convert_checkpoint.py`` and ``trtllm-build``, whose options changed, too: `legacy_options` has a
rule for each of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

import yaml
from pydantic import ValidationError

from cog_triton.builder.arguments import MODEL, ArgumentValue, relative, shown
from cog_triton.builder.checks import check_family
from cog_triton.builder.config import BuildConfig, StepConfig, known_keys
from cog_triton.builder.config_errors import describe
from cog_triton.builder.legacy_options import (
    BUILD_PY,
    CONVERT_CHECKPOINT,
    HF_CONVERT,
    QUANTIZE,
    TRTLLM_BUILD,
    Rules,
)
from cog_triton.builder.legacy_rules import (
    BUILD,
    CONVERT,
    DEFAULTS,
    NEW_DEFAULTS,
    PAGED,
    WORD,
    Draft,
    Given,
    Moved,
    Role,
    StepDraft,
)
from cog_triton.builder.options.script_options import known_options
from cog_triton.builder.plan import Families, Plan, make_plan
from cog_triton.builder.workspace import Echo
from cog_triton.errors import BuildConfigInvalid, EngineIncompatible, UnknownArgument, nearest
from cog_triton.system.gpus import visible_gpus

# TensorRT-LLM's examples since 0.18; a tree of before runs the configs of before.
_TODAY = ("models/", "medusa", "redrafter", "eagle")
_LEGACY = {
    "convert": re.compile(r"hf_\w+_convert\.py|convert_hf_\w+_to_ft\.py"),
    "build": re.compile(r"build\.py"),
}
_FIRST = ("model_dir", "meta_ckpt_dir", "checkpoint_dir", "output_dir")
# Off by default in build.py, and on by default in trtllm-build.
_ON_TODAY = (
    "gpt_attention_plugin",
    "context_fmha",
    "remove_input_padding",
    "kv_cache_type",
    "use_paged_context_fmha",
)
WORDS = ("quantization", "kv_cache_dtype", "tensor_parallel")
# The first SM with Tensor Cores of that type, which the kernels need.
_FIRST_SM = {"fp8": 89, "w4a8_awq": 89, "nvfp4": 100, "int8_sq": 80, "int4_awq": 80, "int8": 80}


@dataclass(frozen=True)
class Translation:
    """The config to run, and a note for each thing that is not as the user wrote it.

    `refusals` are of `translate_leniently` alone: one for each argument that is left out, with the
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


def planned(config: BuildConfig, work_dir: Path, echo: Echo) -> Plan:
    """Plan of `config`, upgraded, in `work_dir`, which is that of the config as it is written.

    Raises:
        UnknownExample, UnknownScript, UnknownArgument, BuildConfigInvalid, EngineIncompatible: as
            `upgraded` and `make_plan`.
    """
    families = Families()
    return make_plan(upgraded(config, families, echo), work_dir, families)


def upgraded(config: BuildConfig, families: Families, echo: Echo) -> BuildConfig:
    """Upgrade `config` for the scripts that `families` has; every change is printed to `echo`.

    Raises:
        UnknownExample: its family is not there, or its engines are not served.
        EngineIncompatible: the GPU that the engine is for cannot compute in such numbers.
        UnknownArgument, BuildConfigInvalid: see `spelled_out` and `translate`.
    """
    family = families.find(config.example_name)
    check_family(config, family)
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
        offers: whether the family has a script on this machine, which is left alone then.
        today: false for the scripts of a tree of before 0.18, which are left alone.

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
    if not family.startswith(_TODAY):
        return Translation(config, tuple(notes))
    draft = Draft(config.model_id, family, _step_drafts(config, offers), notes)
    for step in draft.steps.values():
        _apply(draft, step)
    _complete(draft, config)
    if draft.refusals and not lenient:
        raise UnknownArgument("\n".join(draft.refusals))
    if not draft.refusals:
        _name_variant(draft, config)
        if not draft.notes:
            return Translation(config)
    steps = {step.name: _step(step, config) for step in draft.steps.values()}
    config = _with_steps(config, steps, "the translated config")
    return Translation(config, tuple(draft.notes), tuple(draft.refusals))


def _step_drafts(config: BuildConfig, offers: Callable[[str], bool]) -> dict[Role, StepDraft]:
    def is_legacy(role: Role, step: StepConfig) -> bool:
        script = PurePosixPath(step.script or "").name
        pattern = _LEGACY.get(role)
        return bool(pattern and pattern.fullmatch(script)) and not offers(step.script or "")

    def draft_of(role: Role, name: str, step: StepConfig) -> StepDraft:
        given = {
            key.replace("-", "_"): Given(role, f"{name}.args.{key}", value)
            for key, value in step.args.items()
        }
        return StepDraft(role, name, step, is_legacy(role, step), step.output_dir, given)

    drafts: dict[Role, StepDraft] = {}
    for name, step in config.steps():
        if name in ("convert", "convert_to_ft"):
            drafts["convert"] = draft_of("convert", name, step)
        elif name == "quantize":
            drafts["quantize"] = draft_of("quantize", name, step)
    build = draft_of("build", "build", config.build)
    if build.legacy and "convert" not in drafts:
        top = PurePosixPath(relative(build.output_dir)).parts[0]
        output_dir = "converted" if top == "checkpoint" else "checkpoint"
        drafts["convert"] = StepDraft("convert", "convert", None, False, output_dir, {})
    return {**drafts, "build": build}


def _rules(step: StepDraft) -> Rules:
    if step.legacy:
        return HF_CONVERT if step.role == "convert" else BUILD_PY
    if step.source is not None and step.source.executable == BUILD:
        return TRTLLM_BUILD
    if step.source is not None and PurePosixPath(step.source.script or "").name == CONVERT:
        return CONVERT_CHECKPOINT
    if step.role == "quantize" and step.source is not None and step.source.script is not None:
        return QUANTIZE if PurePosixPath(step.source.script).name == "quantize.py" else {}
    return {}


def _apply(draft: Draft, step: StepDraft) -> None:
    """Translate every argument of one step."""
    if step.source is None:
        draft.notes.append(f"{step.name}: {CONVERT} is a new step: build.py read the model itself")
    elif step.legacy:
        today = CONVERT if step.role == "convert" else BUILD
        draft.notes.append(f"{step.name}: {step.source.script} -> {today}")
    if step.source is not None and len(step.given) < len(step.source.args):
        draft.refusals.append(f"{step.name}.args: an option is there with dashes and underscores")
    rules = _rules(step)
    for name, given in step.given.items():
        rule = rules.get(name)
        if rules is CONVERT_CHECKPOINT and draft.has("convert", name):
            rule = None  # some families have what others have lost
        key = given.label.rsplit(".", 1)[-1]
        if rule is None and step.legacy:
            draft.refuse(given, f"there is no rule for it{nearest(name, list(rules))}")
        elif rule is None:
            draft.keep(given, key)
        elif given.value is False and not (
            isinstance(rule, Moved) and rule.change in (WORD, PAGED)
        ):
            draft.drop(given, "false left it out")
        else:
            rule.apply(draft, given)


def _complete(draft: Draft, config: BuildConfig) -> None:
    """Add what the legacy scripts did by default, and refuse what cannot be completed."""
    convert, build = draft.steps.get("convert"), draft.steps["build"]
    if draft.refusals or convert is None:
        return
    if convert.source is None and config.quantize is not None:
        draft.refusals.append(
            "build.script: 'build.py': cannot be translated: it reads the model, and quantize.py"
            " writes a checkpoint now, for trtllm-build"
        )
    if convert.legacy and "model_dir" not in convert.args:
        draft.refusals.append(f"{convert.name}.args.in-file is missing")
    elif build.legacy and not {"model_dir", "meta_ckpt_dir", "checkpoint_dir"} & {
        *build.args,
        *(convert.args if convert.source is None else ()),
    }:
        draft.refusals.append("build.args.model_dir is missing: the engine would have no weights")
    if convert.legacy or convert.source is None:
        draft.add("convert", "output_dir", convert.output_dir, "output_dir of the step")
        script = PurePosixPath((convert.source or config.build).script or "").name
        dtype = "float32" if script == "hf_gpt_convert.py" else "float16"
        draft.add("convert", "dtype", dtype, f"the default of {script}")
    if build.legacy:
        draft.add("build", "checkpoint_dir", convert.output_dir, f"what {convert.name} writes")
        draft.add("build", "output_dir", build.output_dir, "output_dir of the step")
        draft.notes += _defaults(draft, build)


def _name_variant(draft: Draft, config: BuildConfig) -> None:
    """Give convert_checkpoint.py the variant of its model that the model's id names.

    It looks for the name in the path of the model's directory, and fails without any other word.
    """
    convert = draft.steps.get("convert")
    if convert is None or not (convert.legacy or _rules(convert) is CONVERT_CHECKPOINT):
        return
    for option, variants in draft.variants().items():
        named = next((word for word in variants if word in config.model_id.lower()), None)
        if named is not None:
            draft.add("convert", option, named, "the model's id names it")
        elif convert.legacy:
            draft.add("convert", option, "gpt2", "the default of hf_gpt_convert.py")


def _defaults(draft: Draft, build: StepDraft) -> Iterator[str]:
    """Notes on defaults that are not what they were in build.py."""
    batch, longest, output = DEFAULTS.get(PurePosixPath(draft.family).name, (None, None, None))
    meant: list[tuple[str, int | None, str]] = [
        ("max_batch_size", batch, str(NEW_DEFAULTS[0])),
        ("max_input_len", longest, str(NEW_DEFAULTS[1])),
    ]
    for name, before, now in meant:
        if name not in build.args and str(before) != now:
            was = f"{before} in build.py" if before else "another in build.py"
            yield f"build.args.{name}: not given: {now} now, {was}"
    if "max_seq_len" not in build.args:
        was = f"max_input_len + {output or 'max_output_len'} in build.py"
        yield f"build.args.max_seq_len: not given: as the model has it now, {was}"
    if on := [name for name in _ON_TODAY if name not in build.args]:
        yield f"build.args: not given: on now, off in build.py: {', '.join(on)}"


def _with_steps(
    config: BuildConfig, steps: dict[str, StepConfig], where: str, without: Collection[str] = ()
) -> BuildConfig:
    """`config` with other steps; `where` begins the error of what breaks a rule then."""
    given = {key: getattr(config, key) for key in config.model_fields_set if key not in without}
    try:
        return BuildConfig(**{**given, **steps})
    except ValidationError as error:
        raise BuildConfigInvalid(f"{where}: {describe(error, known_keys())}") from None


def _step(step: StepDraft, config: BuildConfig) -> StepConfig:
    first = {name: step.args[name] for name in _FIRST if name in step.args}
    if step.source is None:
        build = config.build
        return StepConfig(
            script=CONVERT,
            output_dir=step.output_dir,
            args={**first, **step.args},
            env=build.env,
            timeout=build.timeout,
        )
    if not step.legacy:
        return step.source.model_copy(update={"args": step.args})
    today = {"script": CONVERT} if step.role == "convert" else {"executable": BUILD, "script": None}
    return step.source.model_copy(update={**today, "args": {**first, **step.args}})


def spelled_out(config: BuildConfig, family: str, echo: Echo) -> BuildConfig:
    """`config` with its words as arguments of its steps; every one is printed to `echo`.

    The step that makes the checkpoint is added if it is missing. A config without words is
    returned as it is.

    Raises:
        BuildConfigInvalid: a word says other than an argument, or is not for these steps.
        EngineIncompatible: the GPU that the engine is for cannot compute in such numbers.
    """
    words = {name: value for name in WORDS if (value := getattr(config, name)) is not None}
    if config.sm is not None or words:
        _check_sm(words, config.sm, visible_gpus())
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


def _check_sm(words: dict[str, object], meant: int | None, here: Sequence[int]) -> None:
    if meant is not None and here and meant not in here:
        raise EngineIncompatible(
            f"sm {meant}: an engine is built on the GPU that it is for, and here is"
            f" {', '.join(f'sm_{sm}' for sm in sorted(set(here)))}"
        )
    for sm in [meant] if meant is not None else sorted(set(here)):
        for name, value in words.items():
            first = _FIRST_SM.get(str(value))
            if first is not None and sm < first:
                raise EngineIncompatible(
                    f"{name} {value}: needs sm_{first} or later, and this is for sm_{sm}"
                )


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
        step = config.quantize or _new("quantize.py", "quantized")
        args |= {} if word is None else {"qformat": word}
        args |= {} if cache in (None, "auto") else {"kv_cache_dtype": cache}
        parallel = "tp_size"
    else:
        name = convert or "convert"
        step = getattr(config, name) or _new(CONVERT, "checkpoint")
        known = known_options(f"{family}/{CONVERT}")
        options = [] if known is None else [n for o in known.options.options for n in o.names]
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
