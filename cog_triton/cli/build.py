"""``cog-triton build``: build config to engine.tar."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cog_triton.system.paths import expanded
from cog_triton.system.terminal import cancellable, tagged

if TYPE_CHECKING:
    from cog_triton.builder.config import SealedConfig
    from cog_triton.builder.plan import Plan
    from cog_triton.builder.workspace import Echo, Workspace


def build(
    config: Annotated[
        Path | None, typer.Argument(help="Build config, YAML; see configs/build/.")
    ] = None,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="File to write: .tar, .tar.gz or .tar.zst."),
    ] = Path("engine.tar"),
    work_dir: Annotated[
        Path,
        typer.Option(help="Directory of steps and models; finished ones are reused."),
    ] = Path(".work/build"),
    check: Annotated[
        bool, typer.Option("--check", help="Check CONFIG and its arguments; build nothing.")
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print the commands to run; build nothing.")
    ] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Run every step again, finished ones too.")
    ] = False,
    clean: Annotated[
        bool,
        typer.Option(
            "--clean",
            help="Remove CONFIG's builds from the work directory; without CONFIG, all builds and"
            " downloaded models. Build nothing.",
        ),
    ] = False,
    add_seal: Annotated[
        list[Path] | None,
        typer.Option(
            "--add-seal",
            help="With engine: vllm: an engine.tar of the same CONFIG, built on another GPU, whose"
            " seals are packed, too. May be given again.",
        ),
    ] = None,
    porcelain: Annotated[
        bool,
        typer.Option(
            "--porcelain",
            help="For programs: take config (an address or YAML), hf_token and upload_url as JSON"
            " from stdin, and print lines as a log has them.",
        ),
    ] = False,
) -> None:
    """Build an engine: convert, quantize and build as CONFIG says, then pack engine.tar.

    Arguments are checked against the options of the scripts before anything runs.
    Finished steps are skipped, so that an interrupted build resumes.
    --check ends with exit code 2 if the options of a script are not known here.

    Example: cog-triton build configs/build/smollm2-135m-cpu.yaml -o engine.tar
    """

    def echo(line: str) -> None:
        print(tagged(line), flush=True)  # scripts write many lines, rich would be slow

    if clean:
        from cog_triton.builder.config import load_any
        from cog_triton.builder.workspace import Workspace

        workspace = Workspace(work_dir)
        freed = workspace.clean(None if config is None else load_any(config).fingerprint)
        echo(f"[clean] {workspace.root}: removed {freed / 1e6:.0f} MB")
        return
    if porcelain:
        from cog_triton.builder.build_request import run_request

        run_request(sys.stdin.read(), work_dir, output)
        return
    if config is None:
        raise typer.BadParameter("name a build config, as in configs/build/", param_hint="CONFIG")
    if check or plan:
        if not look(config, work_dir, output, echo, check=check, plan=plan):
            raise typer.Exit(2)
        return
    # A check, which is to be done within a second, has no need of these.
    from cog_triton.builder.config import SealedConfig, load_any
    from cog_triton.builder.run import build_of, built
    from cog_triton.builder.workspace import Workspace

    wanted = load_any(config)
    if add_seal and not isinstance(wanted, SealedConfig):
        raise typer.BadParameter("is for configs with engine: vllm", param_hint="--add-seal")
    workspace = Workspace(work_dir, cache=not no_cache)
    elapsed = built(build_of(wanted, workspace, echo, add_seal or []), output)
    echo(
        f"Built {output} ({output.stat().st_size / 1e6:.0f} MB) in {elapsed}."
        f" Serve it: cog-triton serve {shlex.quote(str(output))}"
    )


def look(
    config: Path,
    work_dir: Path,
    output: Path,
    echo: Echo,
    *,
    check: bool,
    plan: bool,
    sm: int | None = None,
) -> bool:
    """Check the config in the file `config`, or print its plan, or both; nothing is run.

    Args:
        sm: SM of the GPU that the engine is for, see `check_combinations`.

    Returns:
        Whether all that was to be checked could be.
    """
    from cog_triton.builder.checks import check_arguments, check_combinations
    from cog_triton.builder.config import SealedConfig, load_any
    from cog_triton.builder.translate import planned
    from cog_triton.builder.workspace import Workspace

    workspace = Workspace(work_dir)
    wanted = load_any(config)
    if isinstance(wanted, SealedConfig):
        _look_at_sealed(wanted, workspace, output, echo)
        return True
    plan_of = planned(wanted, echo)
    with cancellable():
        checked = not check or check_arguments(plan_of.steps, echo)
        if check:
            check_combinations(plan_of, workspace, echo, sm)
        if check and plan_of.config.lora_adapters:
            from cog_triton.builder import packed_adapters

            for line in packed_adapters.look(plan_of.config, _local_model(plan_of)):
                echo(f"[check] lora_adapters: {line}")
    if plan:
        from cog_triton.builder.plan_report import as_lines

        for line in as_lines(plan_of, workspace, output):
            echo(line)
    return checked


def _local_model(plan: Plan) -> Path | None:
    """The model, where it is a directory that needs no download."""
    path = expanded(plan.config.model_id)
    return path if path.is_dir() and plan.config.model_tar_url is None else None


def _look_at_sealed(config: SealedConfig, workspace: Workspace, output: Path, echo: Echo) -> None:
    """Say what a build of a sealed engine will do; its arguments were checked as it was read."""
    from cog_triton.download import model_source
    from cog_triton.system.gpus import gpu_names

    size = model_source.size(config.request, workspace.models)
    model_source.locate(config.request, workspace.models)
    here = ", ".join(sorted(set(gpu_names()))) or "NO GPU, and it needs one"
    echo(f"model     {config.model_id} ({config.weights})")
    echo(f"          {'of unknown size' if size is None else f'{size / 1e9:.1f} GB'} to download")
    echo(f"compiles  for {here}, twice or three times, until a start compiles nothing")
    echo(f"proves    in {workspace.root}")
    echo(f"engine    {output}")
