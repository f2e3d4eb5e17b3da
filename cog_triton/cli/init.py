"""``cog-triton init``: a first config for a model and a GPU; ``schema``: what one may say."""

from __future__ import annotations

import enum
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from cog_triton.errors import EngineIncompatible, InvalidArgument
from cog_triton.sizing.fit import Fit
from cog_triton.sizing.memory_sum import FP8, INT4_AWQ, INT8, Precision
from cog_triton.sizing.model_files import ModelFiles
from cog_triton.system.atomic_write import writing
from cog_triton.system.terminal import coded_errors

_YAML = (".yaml", ".yml")
VLLM_PRECISIONS = (FP8,)
"""What vLLM makes of 16-bit weights while it loads them; others need quantized weights."""


def vllm_arguments(files: ModelFiles, fit: Fit) -> dict[str, tuple[object, str]]:
    """Engine arguments by name, each with its reason."""
    memory = fit.memory
    _require_possible(files, memory.precision)
    found: dict[str, tuple[object, str]] = {"model": (files.name, "directory or hub id")}
    if files.commit is not None:
        found["revision"] = (files.commit, "of the day on which this was written")
    if memory.gpus > 1:
        found["tensor_parallel_size"] = (memory.gpus, "each GPU has a part of every layer")
    if memory.precision is FP8:
        found["quantization"] = ("fp8", "half the memory of 16 bits; made while loading")
        found["kv_cache_dtype"] = ("fp8", "half the memory of 16 bits a token")
    found["max_model_len"] = (fit.max_seq_len, "prompt and answer; the KV cache holds two of them")
    found["max_num_seqs"] = (fit.max_batch_size, "sequences that run at once; others wait")
    return found


def as_json(arguments: dict[str, tuple[object, str]]) -> str:
    """Text of model.json."""
    return json.dumps({name: value for name, (value, _) in arguments.items()}, indent=2) + "\n"


def _require_possible(files: ModelFiles, precision: Precision) -> None:
    if precision in (INT8, INT4_AWQ):
        raise EngineIncompatible(
            f"{files.name}: {precision.title}: vLLM does not make them of 16-bit weights: name a"
            " model whose weights are quantized so already"
        )


class Target(enum.StrEnum):
    """What serves the model."""

    TENSORRT_LLM = "tensorrt-llm"
    VLLM = "vllm"


class Quantization(enum.StrEnum):
    """Quantization of the weights; auto takes the least loss that fits."""

    AUTO = "auto"
    NONE = "none"
    FP8 = "fp8"
    INT8 = "int8"
    INT4_AWQ = "int4_awq"


def init(
    model: Annotated[str, typer.Argument(help="Hugging Face id (ORG/NAME) or directory.")],
    gpu: Annotated[
        str | None,
        typer.Option(help="Such as l40s or 4xh100.", show_default="this machine's"),
    ] = None,
    target: Annotated[Target, typer.Option("--for", help="What is to serve it.")] = (
        Target.TENSORRT_LLM
    ),
    quantization: Annotated[
        Quantization, typer.Option(help="auto: the least loss that fits.")
    ] = Quantization.AUTO,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit on the hub.", show_default="main")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File; for vllm a directory, or a .yaml to seal an engine by; - prints.",
            show_default="by MODEL",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite what is there.")] = False,
) -> None:
    """Write a first config for MODEL, with the reason of every choice.

    For TensorRT-LLM that is a build config, which is checked as by
    build --check; for vLLM a directory with model.json, or, where -o names a
    .yaml, the build config of a sealed engine. By a sum of memory, the
    fewest GPUs with room for 16 sequences of 4096 tokens are chosen, and on
    them the least loss of precision; no weights are fetched. A number of GPUs
    (4xh100) is taken as it is.

    Examples:

      cog-triton init meta-llama/Llama-3.1-8B-Instruct --gpu l40s

      cog-triton init Qwen/Qwen3-32B --gpu 2xh100 --for vllm -o qwen
    """
    from cog_triton.sizing.model_files import describe
    from cog_triton.sources.source import Source

    with coded_errors():
        source = Source.open(f"{model}@{revision}" if revision else model)
        files = describe(source)
        fit = _fit(files, gpu, target, quantization)
        if target is Target.VLLM:
            _write_vllm(files, fit, output, force)
        else:
            _write_build_config(files, fit, output, force)


def _fit(files: ModelFiles, wanted: str | None, target: Target, quantization: Quantization) -> Fit:
    from cog_triton.sizing import fit, gpu_table
    from cog_triton.sizing.memory_sum import AS_STORED, PRECISIONS

    if wanted is None:
        gpu, counts = gpu_table.require_gpu()
    else:
        gpu, count = gpu_table.find(wanted)
        counts = list(gpu_table.COUNTS) if count is None else [count]
    gpu_table.require_supported(gpu)
    if quantization is not Quantization.AUTO:
        return fit.choose(files, gpu, counts, [PRECISIONS[quantization.value]])
    there = fit.precisions_of(files, gpu)
    if target is Target.VLLM:
        there = [one for one in there if one in (AS_STORED, *VLLM_PRECISIONS)]
    return fit.choose(files, gpu, counts, there)


def _write_build_config(files: ModelFiles, fit: Fit, output: Path | None, force: bool) -> None:
    from cog_triton.builder.config import parse_config
    from cog_triton.builder.initial_config import build_config
    from cog_triton.cli.build import look

    named = Path(f"{_short(files, fit)}.yaml")
    path = named if output is None or str(output) == "-" else output
    name = shlex.quote(str(path))
    text = build_config(files, fit, name)
    parse_config(text, str(path))
    told: list[str] = []
    with tempfile.TemporaryDirectory(prefix="cog-triton-") as scratch:
        draft = Path(scratch) / "config.yaml"
        draft.write_text(text, "utf-8")
        places = Path(".work/build"), Path("engine.tar")
        look(draft, *places, told.append, check=True, plan=False, sm=fit.memory.gpu.sm)
    if _printed(text, output):
        return
    _tell(fit)
    typer.echo("\n".join(told))
    write_output(path, text, force=force)
    typer.echo(f"Wrote {path}. Build it: cog-triton build {name} -o engine.tar")


def _write_vllm(files: ModelFiles, fit: Fit, output: Path | None, force: bool) -> None:
    from cog_triton.engines.vllm.model_directory import MODEL_FILE, read_arguments

    arguments = vllm_arguments(files, fit)
    if output is not None and output.suffix in _YAML:
        _write_sealed(files, fit, arguments, output, force)
        return
    text = as_json(arguments)
    if _printed(text, output):
        return
    directory = output or Path(_short(files, fit))
    write_output(directory / MODEL_FILE, text, force=force)
    read_arguments(directory)
    _tell(fit)
    for name, (value, why) in arguments.items():
        typer.echo(f"  {name} = {value}: {why}")
    typer.echo(
        f"Wrote {directory / MODEL_FILE}. Serve it: cog-triton serve {shlex.quote(str(directory))}"
    )


def sealed_config(arguments: dict[str, tuple[object, str]]) -> str:
    """Text of a build config that seals an engine of these arguments."""
    lines = ["engine: vllm"]
    named = {"model": "model_id", "revision": "revision"}
    for name, key in named.items():
        if name in arguments:
            value, why = arguments[name]
            lines.append(f"{key}: {json.dumps(value)} # {why}")
    lines.append("args:")
    rest = {name: it for name, it in arguments.items() if name not in named}
    lines += [f"  {name}: {json.dumps(value)} # {why}" for name, (value, why) in rest.items()]
    return "\n".join(lines) + "\n"


def _write_sealed(
    files: ModelFiles,
    fit: Fit,
    arguments: dict[str, tuple[object, str]],
    path: Path,
    force: bool,
) -> None:
    from cog_triton.builder.sealed_config import parse_any

    text = sealed_config(arguments)
    parse_any(text, str(path))
    write_output(path, text, force=force)
    _tell(fit)
    name = shlex.quote(str(path))
    typer.echo(f"Wrote {path}. Build it on {fit.memory.gpu.name}: cog-triton build {name}")


def _printed(text: str, output: Path | None) -> bool:
    if str(output) != "-":
        return False
    sys.stdout.write(text)
    return True


def _short(files: ModelFiles, fit: Fit) -> str:
    gpus = f"{fit.memory.gpus}x" if fit.memory.gpus > 1 else ""
    words = fit.memory.gpu.name.removeprefix("NVIDIA ").split()
    gpu = "-".join(word for word in words if not word.endswith("GB"))
    return f"{Path(files.name).name}-{gpus}{gpu}".lower()


def _tell(fit: Fit) -> None:
    memory = fit.memory
    typer.echo(f"{memory.gpus} x {memory.gpu.name} (sm_{memory.gpu.sm}), {memory.precision.title}")
    for line in memory.lines():
        typer.echo(f"  {line}")


def write_output(path: Path, text: str, *, force: bool) -> None:
    """Write `text` for the user, whole or not at all.

    Raises:
        InvalidArgument: there is such a file and `force` is not given, or it cannot be written.
    """
    if path.exists() and not force:
        raise InvalidArgument(f"{path} is there already: give --force to overwrite it, or -o")
    content = text.encode()
    try:
        with writing(path, len(content), at_most=False) as file:
            file.write(content)
    except OSError as error:
        raise InvalidArgument(f"--output {path}: {error.strerror}") from error


class Schema(enum.StrEnum):
    """Files that have a JSON schema."""

    BUILD = "build"


def schema(
    what: Annotated[Schema, typer.Argument(help="Which file's schema.")],
) -> None:
    """Print a JSON schema, for editors to check and complete YAML files.

    Example: cog-triton schema build > build.schema.json
    """
    from cog_triton.builder.sealed_config import json_schema

    typer.echo(json_schema())
