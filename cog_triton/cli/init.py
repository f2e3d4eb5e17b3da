"""``cog-triton init``: a first config for a model and a GPU; ``schema``: what one may say."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cog_triton.errors import InvalidArgument
from cog_triton.system.atomic_write import writing

if TYPE_CHECKING:
    from cog_triton.sizing.fit import Fit
    from cog_triton.sizing.model_files import ModelFiles

_YAML = (".yaml", ".yml")


Target = Literal["tensorrt-llm", "vllm"]
Quantization = Literal["auto", "none", "fp8", "int8", "int4_awq"]


def init(
    model: Annotated[str, typer.Argument(help="Hugging Face id (ORG/NAME) or directory.")],
    gpu: Annotated[
        str | None,
        typer.Option(help="Such as l40s or 4xh100.", show_default="this machine's"),
    ] = None,
    target: Annotated[Target, typer.Option("--for", help="What is to serve it.")] = "tensorrt-llm",
    quantization: Annotated[
        Quantization, typer.Option(help="auto: the least loss that fits.")
    ] = "auto",
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

    source = Source.open(f"{model}@{revision}" if revision else model)
    files = describe(source)
    fit = _fit(files, gpu, target, quantization)
    prints = str(output) == "-"
    write = _for_vllm if target == "vllm" else _for_tensorrt_llm
    path, text, said = write(files, fit, None if prints else output)
    if prints:
        sys.stdout.write(text)
        return
    write_output(path, text, force=force)
    memory = fit.memory
    gpus = f"{memory.gpus} x {memory.gpu.name} (sm_{memory.gpu.sm})"
    typer.echo(f"{gpus}, {memory.precision.title}")
    for line in (*(f"  {line}" for line in memory.lines()), *said):
        typer.echo(line)


def _fit(files: ModelFiles, wanted: str | None, target: Target, quantization: Quantization) -> Fit:
    from cog_triton.sizing import fit, gpu_table
    from cog_triton.sizing.memory_sum import AS_STORED, FP8, PRECISIONS

    if wanted is None:
        gpu, counts = gpu_table.require_gpu()
    else:
        gpu, count = gpu_table.find(wanted)
        counts = list(gpu_table.COUNTS) if count is None else [count]
    gpu_table.require_supported(gpu)
    if quantization != "auto":
        return fit.choose(files, gpu, counts, [PRECISIONS[quantization]])
    there = fit.precisions_of(files, gpu)
    if target == "vllm":  # others need weights that are quantized already
        there = [one for one in there if one in (AS_STORED, FP8)]
    return fit.choose(files, gpu, counts, there)


def _for_tensorrt_llm(
    files: ModelFiles, fit: Fit, output: Path | None
) -> tuple[Path, str, list[str]]:
    """The file, its text, and lines for the user."""
    from cog_triton.builder.initial_config import build_config
    from cog_triton.cli.build import look

    path = output or Path(f"{_short(files, fit)}.yaml")
    name = shlex.quote(str(path))
    text = build_config(files, fit, name)
    said: list[str] = []
    with tempfile.TemporaryDirectory(prefix="cog-triton-") as scratch:
        draft = Path(scratch) / "config.yaml"
        draft.write_text(text, "utf-8")
        places = Path(".work/build"), Path("engine.tar")
        look(draft, *places, said.append, check=True, plan=False, sm=fit.memory.gpu.sm)
    said.append(f"Wrote {path}. Build it: cog-triton build {name} -o engine.tar")
    return path, text, said


def _for_vllm(files: ModelFiles, fit: Fit, output: Path | None) -> tuple[Path, str, list[str]]:
    from cog_triton.builder.config import parse_any
    from cog_triton.builder.initial_config import sealed_config, vllm_arguments
    from cog_triton.engines.vllm.model_directory import MODEL_FILE, checked_arguments

    arguments = vllm_arguments(files, fit)
    if output is not None and output.suffix in _YAML:
        text, name = sealed_config(arguments), shlex.quote(str(output))
        parse_any(text, str(output))
        said = f"Wrote {output}. Build it on {fit.memory.gpu.name}: cog-triton build {name}"
        return output, text, [said]
    directory = output or Path(_short(files, fit))
    path, values = directory / MODEL_FILE, {name: value for name, (value, _) in arguments.items()}
    checked_arguments(path, values)
    lines = [f"  {name} = {value}: {why}" for name, (value, why) in arguments.items()]
    served = f"cog-triton serve {shlex.quote(str(directory))}"
    return path, json.dumps(values, indent=2) + "\n", [*lines, f"Wrote {path}. Serve it: {served}"]


def _short(files: ModelFiles, fit: Fit) -> str:
    gpus = f"{fit.memory.gpus}x" if fit.memory.gpus > 1 else ""
    words = fit.memory.gpu.name.removeprefix("NVIDIA ").split()
    gpu = "-".join(word for word in words if not word.endswith("GB"))
    return f"{Path(files.name).name}-{gpus}{gpu}".lower()


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


def schema(
    what: Annotated[Literal["build"], typer.Argument(help="Which file's schema.")],
) -> None:
    """Print a JSON schema, for editors to check and complete YAML files.

    Example: cog-triton schema build > build.schema.json
    """
    from cog_triton.builder.config import json_schema

    typer.echo(json_schema())
