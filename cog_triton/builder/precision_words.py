"""Precision in one word: what `quantization`, `kv_cache_dtype` and `tensor_parallel` fill in.

They are checked together against the SM, and become arguments of the step that makes the
checkpoint: quantize.py, which reads the model itself, or convert_checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from cog_triton.builder.arguments import MODEL, ArgumentValue, shown
from cog_triton.builder.config import BuildConfig, StepConfig, known_keys
from cog_triton.builder.config_errors import describe
from cog_triton.builder.example_families import Families
from cog_triton.builder.options.recorded import known_options
from cog_triton.builder.workspace import Echo
from cog_triton.errors import BuildConfigInvalid, EngineIncompatible
from cog_triton.system.gpus import visible_gpus

WORDS = ("quantization", "kv_cache_dtype", "tensor_parallel")
_TODAY = "models/"
_CONVERT, _QUANTIZE = "convert_checkpoint.py", "quantize.py"
# The first SM with Tensor Cores of that type, which the kernels need.
_FIRST_SM = {"fp8": 89, "w4a8_awq": 89, "nvfp4": 100, "int8_sq": 80, "int4_awq": 80, "int8": 80}


def spelled_out(config: BuildConfig, families: Families, echo: Echo) -> BuildConfig:
    """`config` with its words as arguments of its steps; every one is printed to `echo`.

    The step that makes the checkpoint is added if it is missing. A config without words is
    returned as it is.

    Raises:
        UnknownExample: lists the families that there are.
        BuildConfigInvalid: a word says other than an argument, or is not for these steps.
        EngineIncompatible: the GPU that the engine is for cannot compute in such numbers.
    """
    words = {name: value for name in WORDS if (value := getattr(config, name)) is not None}
    if config.sm is not None or words:
        _check_sm(words, config.sm, visible_gpus())
    if not words:
        return config
    family = families.find(config.example_name)
    if not family.startswith(_TODAY):
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
    given = {key: getattr(config, key) for key in config.model_fields_set if key not in words}
    try:
        return BuildConfig(**{**given, **steps})
    except ValidationError as error:
        raise BuildConfigInvalid(f"{', '.join(words)}: {describe(error, known_keys())}") from None


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
        step = config.quantize or _new(_QUANTIZE, "quantized")
        args |= {} if word is None else {"qformat": word}
        args |= {} if cache in (None, "auto") else {"kv_cache_dtype": cache}
        parallel = "tp_size"
    else:
        name = convert or "convert"
        step = getattr(config, name) or _new(_CONVERT, "checkpoint")
        known = known_options(f"{family}/{_CONVERT}")
        options = [] if known is None else [n for o in known.options.options for n in o.names]
        if cache == "fp8" or (cache == "int8" and "int8_kv_cache" not in options):
            raise BuildConfigInvalid(
                f"kv_cache_dtype {cache}: {family}/{_CONVERT} makes no such cache: quantize.py"
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
