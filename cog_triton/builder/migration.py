"""Migration of build configs to vLLM, by the rows of options.yaml."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from cog_triton.builder.checks import OF_ARGUMENTS, Facts, breaches
from cog_triton.builder.config import BuildConfig, StepConfig
from cog_triton.builder.plan import OWN, Families
from cog_triton.builder.script_options import ArgumentValue, Row, Target, Verdict, shown, table
from cog_triton.builder.translate import WORDS, translate
from cog_triton.engines.tensorrt_llm import model_settings
from cog_triton.engines.tensorrt_llm.adapter_modules import HF_MODULES
from cog_triton.engines.tensorrt_llm.runtime_settings import carried
from cog_triton.engines.vllm import argument_types
from cog_triton.errors import EngineIncompatible, InvalidArgument, InvalidPredictorConfig
from cog_triton.system.paths import expanded

VERDICTS: Mapping[Verdict, str] = {
    "carries": "carried over",  # means the same
    "changes": "changed",  # has another meaning, or another way to be said
    "lost": "lost",  # cannot be had, or not without more than this config says
    "unneeded": "not needed",  # was for building the engine, and is not missed
}
"""In words, as in a count of options."""
_QUANTIZED = ("weight_only_precision", "use_weight_only_with_precision")
_MODEL_KEYS = ("model_id", "convert", "convert_to_ft", "quantize", "build")
FILE = "model.json"
"""What an engine directory of vLLM has."""
_GIB = 1 << 30


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
    """Arguments of vLLM by name, sections as mappings, and the findings in reading order."""

    arguments: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def count(self, verdict: Verdict) -> int:
        """The number of findings with this verdict."""
        return sum(finding.verdict == verdict for finding in self.findings)


def migrate(config: BuildConfig, settings: Mapping[str, Any] | None = None) -> Migration:
    """Migrate `config` and `settings`, the server's ``tensorrt_llm.args``, to vLLM.

    Legacy configs are translated first; what cannot be is among the findings as lost.

    Raises:
        UnknownExample: there is no such example family.
        EngineIncompatible: it is no engine of TensorRT-LLM, or its model is no Hugging Face one.
        InvalidPredictorConfig: a setting is unknown or of a wrong type.
    """
    family = Families().find(config.example_name)
    _require_tensorrt_llm(config, family)
    found = Migration()
    _apply(found, Target(to="model"), "model_id", config.model_id, _model(config.model_id))
    translation = translate(config, family, lenient=True)
    config = translation.config
    for refusal in translation.refusals:
        option, _, why = refusal.partition(": cannot be translated: ")
        found.findings.append(Finding("lost", option, None, why=why or None))
    defaults: dict[str, Any] = {}
    for section, label, option, value in _given(config, family, settings or {}):
        rule = table()[section].get(option.replace("-", "_"), Row()).vllm.of(value)
        becomes = CONVERSIONS[rule.convert](value) if rule.convert else _plain(value)
        _apply(found, rule, label, value, becomes)
        defaults |= rule.also
    for path, value in defaults.items():
        place, name = _place(found.arguments, path)
        place[name] = value if place.get(name) is None else place[name]
    # Such an engine would be refused, so what it would do is not known.
    for breach in breaches(Facts(config, PurePosixPath(family).name), OF_ARGUMENTS):
        why = f"TensorRT-LLM builds no such engine: {breach.must}"
        found.findings.append(Finding("lost", breach.where, breach.value, why=why))
    if len(config.steps()) == 1 and all(getattr(config, word) is None for word in WORDS):
        checkpoint = config.build.args.get("checkpoint_dir")
        why = "no step of this config makes it: its data type, quantization and GPUs are not known"
        found.findings.append(Finding("lost", "build.args.checkpoint_dir", checkpoint, why=why))
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
    path = expanded(name)
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
        for name, value in model_settings.given(values).items():
            if source != "runtime" or name not in settings:
                typed = yaml.safe_load(value) if isinstance(value, str) else value
                yield "serve", f"{source}.{name}", name, typed


def _args(step: StepConfig) -> dict[str, ArgumentValue]:
    """Arguments that are in effect: without those left out, with what a bare flag stands for."""
    args = {name: value for name, value in step.args.items() if value is not False}
    names = {name.replace("-", "_") for name in args}
    if "use_weight_only" in names and not names & set(_QUANTIZED):
        args["weight_only_precision"] = "int8"  # what convert_checkpoint.py takes by itself
    elif "use_weight_only" not in names:
        args.pop("weight_only_precision", None)  # without effect then
    return args


def _apply(found: Migration, rule: Target, label: str, value: object, becomes: object) -> None:
    path, verdict, why = rule.to, rule.verdict, rule.why
    if path is None:
        found.findings.append(Finding(verdict, label, value, why=why))
        return
    if becomes == value and rule.convert == "lora_rank":
        verdict, why = "carries", None
    section, name = _place(found.arguments, path)
    other = section.get(name)
    if other is None:
        section[name] = becomes
    elif other != becomes:
        verdict, why = "lost", f"another option has set {path} to {_text(other)}"
        path = None
    found.findings.append(Finding(verdict, label, value, path, becomes, why))


def _place(arguments: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    """The section that has `path`, and its name there."""
    section, _, name = path.rpartition(".")
    return arguments.setdefault(section, {}) if section else arguments, name


def _plain(value: object) -> object:
    """A value as JSON and YAML have it; a bare flag is true."""
    return True if value is None else list(value) if isinstance(value, tuple) else value


def _text(value: object) -> str:
    if isinstance(value, str | bool | int | float | None):
        return shown(value)
    return str(_plain(value))


def text_of(found: Migration) -> str:
    """The file's text.

    Raises:
        InvalidPredictorConfig: vLLM does not take an argument, as a value of the build config has
            a type that TensorRT-LLM's own script would refuse, too.
    """
    types, wrong = argument_types.types_of(), []
    for name, value in found.arguments.items():
        try:
            argument_types.convert(value, types.engine_args[name])
        except KeyError:
            wrong.append(f"{name}: {types.title} has no such engine argument")
        except ValueError as error:
            wrong.append(f"{name}={value!r}: {error} (vLLM {types.version})")
    if wrong:
        raise InvalidPredictorConfig("\n".join(wrong))
    return json.dumps(found.arguments, indent=2) + "\n"


def path_of(output: Path) -> Path:
    """The file that ``-o OUTPUT`` names: `output` itself by its suffix, else one in a directory.

    Raises:
        InvalidArgument: `output` is a file of another kind.
    """
    if output.suffix == ".json":
        return output
    if output.is_file() or output.suffix in (".yaml", ".yml", ".tar"):
        raise InvalidArgument(f"--output {output}: must be a directory, or end in .json")
    return output / FILE


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _lora_rank(value: Any) -> Any:
    """The least rank of vLLM's that has room for `value`, unless that is no number."""
    if not str(value).isdecimal():
        return _plain(value)
    kinds = argument_types.types_of().engine_args["max_lora_rank"]
    ranks = sorted(int(kind[1:]) for kind in kinds if kind[1:].isdecimal())
    return next((rank for rank in ranks if rank >= int(value)), ranks[-1])


def _lora_modules(value: Any) -> list[str]:
    """Hugging Face's names of modules: ``attn_q`` is ``q_proj``."""
    return [HF_MODULES.get(item, item) for item in _items(value)]


CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "fp8": lambda _: "fp8",
    "on": lambda _: True,
    "gib": lambda value: round(value / _GIB, 3),
    "list": _items,
    "upper": lambda value: str(value).upper(),
    "lora_rank": _lora_rank,
    "lora_modules": _lora_modules,
}
"""By the names that rules give in ``as``."""
