"""Translation of legacy build configs for the scripts of today's TensorRT-LLM.

Until 0.8 it had ``hf_*_convert.py`` and ``build.py``; since then it has ``convert_checkpoint.py``
and ``trtllm-build``, whose options changed, too. `option_table` has a rule for each legacy option.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath

import yaml
from pydantic import ValidationError

from cog_triton.builder.arguments import relative
from cog_triton.builder.config import BuildConfig, StepConfig, known_keys
from cog_triton.builder.config_errors import describe
from cog_triton.builder.example_families import Families
from cog_triton.builder.legacy.option_rules import DEFAULTS, NEW_DEFAULTS, PAGED, WORD, Moved
from cog_triton.builder.legacy.option_table import (
    BUILD_PY,
    CONVERT_CHECKPOINT,
    HF_CONVERT,
    QUANTIZE,
    TRTLLM_BUILD,
    Rules,
)
from cog_triton.builder.legacy.translation_draft import (
    BUILD,
    CONVERT,
    Draft,
    Given,
    Role,
    StepDraft,
)
from cog_triton.builder.workspace import Echo
from cog_triton.errors import BuildConfigInvalid, UnknownArgument, nearest

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


def translated(config: BuildConfig, families: Families, echo: Echo) -> BuildConfig:
    """Translate `config` for the scripts that `families` has; every change is printed to `echo`.

    Raises:
        UnknownExample: lists what there is.
        UnknownArgument, BuildConfigInvalid: see `translate`.
    """
    family = families.find(config.example_name)
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
    return Translation(_translated(config, draft), tuple(draft.notes), tuple(draft.refusals))


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


def _translated(config: BuildConfig, draft: Draft) -> BuildConfig:
    steps = {step.name: _step(step, config) for step in draft.steps.values()}
    given = {name: getattr(config, name) for name in config.model_fields_set}
    try:
        return BuildConfig(**{**given, **steps})
    except ValidationError as error:
        raise BuildConfigInvalid(
            f"the translated config: {describe(error, known_keys())}"
        ) from None


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
