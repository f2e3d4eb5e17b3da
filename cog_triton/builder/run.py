"""Run of a build: its checks, its model, its stages one after another, and the tar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

from cog_triton.builder import package
from cog_triton.builder.config import AnyConfig, SealedConfig
from cog_triton.builder.script_build import ScriptBuild
from cog_triton.builder.sealed_build import SealedBuild
from cog_triton.builder.translate import planned
from cog_triton.builder.workspace import Echo, Stage, Workspace
from cog_triton.settings import load_group
from cog_triton.settings.programs import BuilderSettings
from cog_triton.system.terminal import cancellable
from cog_triton.system.terminal_progress import BuildProgress

Begin = Callable[[str], None]
"""Gets the name of each stage as it begins."""


class Build(Protocol):
    """A build of a config, for any engine.

    Attributes:
        echo: gets every line of progress, without newline.
    """

    workspace: Workspace
    echo: Echo

    @property
    def config(self) -> AnyConfig:
        """The config, as it is run."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """Names of the stages that `fetch` will return."""
        ...

    def check(self) -> None:
        """Check what can be checked before anything is fetched; raises UserError."""

    def fetch(self) -> Sequence[Stage]:
        """Fetch what is to be built; returns the stages, of which the last makes the engine."""
        ...


def build_of(
    config: AnyConfig, workspace: Workspace, echo: Echo, added: Sequence[Path] = ()
) -> Build:
    """The build of a config; see `SealedBuild` for `added`. Raises as `planned`."""
    if isinstance(config, SealedConfig):
        return SealedBuild(config, workspace, echo, added)
    return ScriptBuild(planned(config, echo), workspace, echo)


@contextmanager
def making_engine(
    build: Build, begin: Begin = lambda _: None
) -> Iterator[tuple[Path, list[Stage], IO[str]]]:
    """Context of the engine of a build: its directory, the stages, and the workspace's lock.

    Raises:
        As `run_build`.
    """
    workspace, config = build.workspace, build.config.fingerprint
    with cancellable(), workspace.coded():
        begin("check")
        build.check()
        with workspace.in_use() as lock:
            begin("model")
            stages = list(build.fetch())
            workspace.record(config, stages, workspace.packed(config))
            for stage in stages:
                begin(stage.name)
                output = workspace.run(stage, build.echo)
            yield output / package.ENGINE, stages, lock


def run_build(build: Build, output: Path, begin: Begin = lambda _: None) -> Path:
    """Build an engine and write it to `output`; then prune what builds have left.

    Args:
        output: the engine.tar to write, .tar, .tar.gz or .tar.zst; it appears complete or not at
            all.
        begin: gets the name of each stage as it begins.

    Returns:
        `output`.

    Raises:
        InvalidArgument: `output` has another suffix or cannot be written there, or the workspace
            cannot be used.
        DiskFull: no space was left.
        UserError: E1300-E1306, as the arguments, the model or a script finds.
        BuildStepFailed, BuildStepTimeout: a step ended with an error of its own, or did not end.
        BuildCancelled: KeyboardInterrupt or SIGTERM; the step's processes are gone.
    """
    workspace, config = build.workspace, build.config.fingerprint
    package.check(output, build.echo)
    with making_engine(build, begin) as (engine, stages, lock):
        begin("package")
        key = stages[-1].key
        if workspace.cache and workspace.packed(config) == [key, *_identity(output)]:
            build.echo(f"[package] {output} is already written")
        else:
            package.pack(engine, output, build.echo)
            workspace.record(config, stages, [key, *_identity(output)])
        workspace.prune(lock, config, load_group(BuilderSettings).build_cache_bytes)
    return output


def built(build: Build, output: Path) -> str:
    """`run_build` with its progress; returns how long it took."""
    with BuildProgress(build.echo, len(build.names) + 3) as progress:
        build.echo = progress.echo
        run_build(build, output, progress.begin)
    return progress.elapsed


def _identity(tar: Path) -> list[str | int]:
    if not tar.is_file():
        return []
    stat = tar.stat()
    return [str(tar.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino]
