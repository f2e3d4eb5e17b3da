"""Migration of one build config: the arguments of a target, and what became of every option."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from cog_triton.builder.combinations.facts import Facts
from cog_triton.builder.combinations.rules import breaches_of
from cog_triton.builder.command_line import ArgumentValue, shown
from cog_triton.builder.config import BuildConfig, StepConfig
from cog_triton.builder.example_families import OWN, Families
from cog_triton.builder.legacy.translate import translate_leniently
from cog_triton.builder.migration.convert_value import CONVERSIONS
from cog_triton.builder.migration.rule_table import Rule, Target, Verdict, find
from cog_triton.engines.tensorrt_llm.backend_settings import Parameters
from cog_triton.engines.tensorrt_llm.runtime_settings import carried
from cog_triton.errors import EngineIncompatible

_QUANTIZED = ("weight_only_precision", "use_weight_only_with_precision")
_MODEL_KEYS = ("model_id", "convert", "convert_to_ft", "quantize", "build")


@dataclass(frozen=True)
class Finding:
    """What became of one option: `to` is the target's argument, `becomes` its value there."""

    verdict: Verdict
    option: str
    value: object
    to: str | None = None
    becomes: object = None
    why: str | None = None

    def __str__(self) -> str:
        where = "" if self.to is None else f" -> {self.to}: {_text(self.becomes)}"
        given = "" if self.value is None else f": {_text(self.value)}"
        return f"{self.option}{given}{where}{f': {self.why}' if self.why else ''}"


@dataclass
class Migration:
    """Arguments of `target` by name, sections as mappings, and the findings in reading order."""

    target: Target
    arguments: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def count(self, verdict: Verdict) -> int:
        """The number of findings with this verdict."""
        return sum(finding.verdict == verdict for finding in self.findings)


def migrate(
    config: BuildConfig, target: Target, settings: Mapping[str, Any] | None = None
) -> Migration:
    """Migrate `config` and `settings`, the server's ``tensorrt_llm.args``, to `target`.

    Legacy configs are translated first; what cannot be is among the findings as lost.

    Raises:
        UnknownExample: there is no such example family.
        EngineIncompatible: it is no engine of TensorRT-LLM, or its model is no Hugging Face one.
        InvalidPredictorConfig: a setting is unknown or of a wrong type.
    """
    family = Families().find(config.example_name)
    _require_tensorrt_llm(config, family)
    found = Migration(target)
    model = _model(config.model_id)
    found.arguments["model"] = model
    found.findings.append(Finding("carries", "model_id", config.model_id, "model", model))
    translation = translate_leniently(config, family)
    for refusal in translation.refusals:
        option, _, why = refusal.partition(": cannot be translated: ")
        found.findings.append(Finding("lost", option, None, why=why or None))
    defaults: dict[str, Any] = {}
    for section, label, option, value in _given(translation.config, family, settings or {}):
        rule = find(section, option, target, value)
        _apply(found, rule, label, option, value)
        defaults |= rule.also
    for path, value in defaults.items():
        if _get(found.arguments, path) is None:
            _set(found.arguments, path, value)
    # An engine would be refused, so what it would do is not known.
    for broken_rule, broken in breaches_of(Facts(translation.config, PurePosixPath(family).name)):
        if not broken_rule.engines:
            why = f"TensorRT-LLM builds no such engine: {broken.must} ({broken_rule.name})"
            found.findings.append(Finding("lost", broken.where, broken.value, why=why))
    if len(translation.config.steps()) == 1:
        found.findings += _unknown_checkpoint(translation.config)
    return found


def _require_tensorrt_llm(config: BuildConfig, family: str) -> None:
    if (OWN / family).is_dir():
        raise EngineIncompatible(
            f"example_name {config.example_name!r}: makes no engine of TensorRT-LLM: name the model"
            " itself, as in cog-triton serve ORG/NAME --family vllm"
        )
    if config.model_id.startswith("pypi:") or config.model_id.endswith(".gguf"):
        raise EngineIncompatible(
            f"model_id {config.model_id!r}: a Hugging Face id or directory is what migrate can name"
        )


def _model(name: str) -> str:
    """The model as the target is to name it: directories by their absolute path."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.is_dir() or name.startswith((".", "/", "~")) else name


def _given(
    config: BuildConfig, family: str, settings: Mapping[str, Any]
) -> Iterator[tuple[str, str, str, Any]]:
    """Section, label, name and value of all that is given."""
    for key in sorted(config.model_fields_set - {*_MODEL_KEYS, "runtime"}):
        value: object = getattr(config, key)
        if value is None or value == {}:
            continue
        if key == "example_name":
            value = PurePosixPath(family).name
        elif key == "hf_token":
            value = "..."
        elif isinstance(value, dict):
            value = ", ".join(value)
        yield "config", key, key, value
    for name, step in config.steps():
        section = "convert" if name == "convert_to_ft" else name
        for option, given in _args(step).items():
            yield section, f"{name}.args.{option}", option, given
    for source, values in (("runtime", carried(config.runtime)), ("tensorrt_llm.args", settings)):
        parsed = Parameters.parse(values)
        for name in values:
            if parsed.given(name) and not (source == "runtime" and name in settings):
                yield "serve", f"{source}.{name}", name, getattr(parsed, name)


def _args(step: StepConfig) -> dict[str, ArgumentValue]:
    """Arguments that are in effect: without those left out, with what a bare flag stands for."""
    args = {name: value for name, value in step.args.items() if value is not False}
    names = {name.replace("-", "_") for name in args}
    if "use_weight_only" in names and not names & set(_QUANTIZED):
        args["weight_only_precision"] = "int8"  # what convert_checkpoint.py takes by itself
    elif "use_weight_only" not in names:
        args.pop("weight_only_precision", None)  # without effect then
    return args


def _apply(found: Migration, rule: Rule, label: str, option: str, value: object) -> None:
    path = option if rule.to == "*" else rule.to
    verdict, why = rule.verdict, rule.why
    if path is None:
        found.findings.append(Finding(verdict, label, value, why=why))
        return
    becomes = CONVERSIONS[rule.convert](value) if rule.convert else _plain(value)
    if becomes == value and rule.convert == "lora_rank":
        verdict, why = "carries", None
    other = _get(found.arguments, path)
    if other is None:
        _set(found.arguments, path, becomes)
    elif other != becomes:
        verdict, why = "lost", f"another option has set {path} to {_text(other)}"
        path = None
    found.findings.append(Finding(verdict, label, value, path, becomes, why))


def _plain(value: object) -> object:
    """A value as JSON and YAML have it; a bare flag is true."""
    if value is None:
        return True
    return list(value) if isinstance(value, tuple) else value


def _get(arguments: Mapping[str, Any], path: str) -> Any:
    section, _, name = path.rpartition(".")
    return (arguments.get(section, {}) if section else arguments).get(name)


def _set(arguments: dict[str, Any], path: str, value: object) -> None:
    section, _, name = path.rpartition(".")
    (arguments.setdefault(section, {}) if section else arguments)[name] = value


def _unknown_checkpoint(config: BuildConfig) -> Iterator[Finding]:
    words = (config.quantization, config.kv_cache_dtype, config.tensor_parallel)
    if any(word is not None for word in words):
        return
    yield Finding(
        "lost",
        "build.args.checkpoint_dir",
        config.build.args.get("checkpoint_dir"),
        why="no step of this config makes it: its data type, quantization and GPUs are not known",
    )


def _text(value: object) -> str:
    if isinstance(value, str | bool | int | float | None):
        return shown(value)
    return str(_plain(value))
