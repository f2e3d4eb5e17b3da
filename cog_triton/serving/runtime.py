"""Everything between an engine directory and a `TextGenerator` that is ready to serve."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from typing_extensions import Self

from cog_triton import preflight
from cog_triton.engines.base import EngineFamily
from cog_triton.engines.registry import open_engine
from cog_triton.errors import EngineIncompatible, TritonStartFailed, TritonUnavailable
from cog_triton.machine import Machine, backends_in, library_versions
from cog_triton.serving.admission import Admission, admission_for
from cog_triton.serving.generate import Observer, TextGenerator
from cog_triton.serving.supervisor import Supervisor
from cog_triton.serving.weights import engine_directory
from cog_triton.settings import Settings
from cog_triton.tokenizer import EngineTokenizer
from cog_triton.triton import distribution
from cog_triton.triton.client import TritonClient
from cog_triton.triton.repository import ENGINE_MODEL, max_batch_size, render
from cog_triton.triton.serve_config import ServeConfig, load_serve_config
from cog_triton.triton.server import TritonServer

_STOPPING = "the server is stopping; try again"
_LAST_WORDS_S = 2.0


class Runtime:
    """A running engine: its tokenizer, its supervised Triton and its `generator`.

    For metrics: `admission` counts requests, `supervisor` knows the state of Triton.
    """

    def __init__(
        self,
        settings: Settings,
        family: EngineFamily,
        tokenizer: EngineTokenizer,
        server: TritonServer,
        admission: Admission,
        on_failed: Callable[[], None],
        observer: Observer | None = None,
    ) -> None:
        """`on_failed` is called, on some thread, when Triton could not be kept running."""
        self.settings = settings
        self.family = family
        self.tokenizer = tokenizer
        self.admission = admission
        client = TritonClient(settings.triton_url, settings.triton_timeout, family.error)
        self.generator = TextGenerator(
            settings,
            family.limits,
            tokenizer,
            client,
            admission,
            on_failure=lambda: self.supervisor.suspect(),
            to_values=family.values,
            observer=observer,
        )
        self.supervisor = Supervisor(
            settings, server, client, self.generator.probe, admission, on_failed
        )
        self._draining = False

    @classmethod
    async def start(
        cls,
        settings: Settings,
        weights: str | None = None,
        on_failed: Callable[[], None] = lambda: None,
        observer: Observer | None = None,
    ) -> Self:
        """Load the engine and start Triton; raises the coded error that says what is wrong.

        Cheap checks come first: a bad config is told before any weights are fetched.
        """
        preflight.require_gpu(settings.cog_triton_sm)
        config = (
            load_serve_config(settings.cog_triton_config)
            if settings.cog_triton_config
            else ServeConfig()
        )
        work_dir = settings.work_dir
        directory = await engine_directory(settings, weights or settings.cog_weights)
        family = open_engine(directory)
        tokenizer = EngineTokenizer.load(family.tokenizer_dir)
        run_dir = _fresh_run_dir(work_dir)
        _require_machine(settings, family, config, run_dir)
        repository = render(family, config, run_dir / "model_repo")
        server = TritonServer(settings, repository, run_dir)
        admission = admission_for(settings, max_batch_size(repository))
        runtime = cls(settings, family, tokenizer, server, admission, on_failed, observer)
        try:
            await runtime.supervisor.start()
        except TritonStartFailed as error:
            known = family.start_error(server.log.read_text("utf-8", "replace"))
            if known is None:
                raise
            raise known from error
        return runtime

    async def stop(self) -> None:
        """Stop Triton and close every connection."""
        await self.supervisor.stop()

    def require_ready(self) -> None:
        """Raise E2105 while predictions would not be served, and E2106 when they never will."""
        if self.supervisor.error is not None:
            raise self.supervisor.error
        if self._draining:
            raise TritonUnavailable(_STOPPING)

    def drain(self) -> None:
        """Take nothing more, and end what runs or waits within DRAIN_TIMEOUT; blocks."""
        timeout = self.settings.drain_timeout
        self._draining = True
        self.supervisor.retire()
        self.admission.refuse(TritonUnavailable(_STOPPING))
        if not self.admission.until_idle(timeout):
            self.admission.close(
                TritonUnavailable(
                    f"the server is stopping, and waited no longer than {timeout:g} s"
                    " (DRAIN_TIMEOUT); try again"
                )
            )
            self.admission.until_idle(_LAST_WORDS_S)


def _require_machine(
    settings: Settings, family: EngineFamily, config: ServeConfig, run_dir: Path
) -> None:
    """Compare the engine with this machine before Triton loads it; raises E1305 or E1306."""
    triton = distribution.find(run_dir, settings.tritonserver)
    nodes = str(config.of(ENGINE_MODEL).get("num_nodes", 1))
    try:
        needs = preflight.needs_of(
            family.directory,
            family.backend,
            family.world_size,
            family.versions,
            max(int(nodes), 1) if nodes.isdecimal() else 1,  # else `render` refuses it
        )
        here = Machine(
            preflight.visible_gpus() if family.world_size else (),
            triton.binary,
            backends_in(triton.backend_directory),
            library_versions(),
        )
        for remark in preflight.require_engine(needs, here):
            print(f"Warning: {remark}", flush=True)
    except EngineIncompatible as error:
        if not settings.cog_triton_skip_preflight:
            raise
        print(f"Warning: COG_TRITON_SKIP_PREFLIGHT is set, so this is served: {error}", flush=True)


def _fresh_run_dir(work_dir: Path) -> Path:
    """``run/<pid>``, after removing those whose process is gone."""
    runs = work_dir / "run"
    runs.mkdir(parents=True, exist_ok=True)
    for old in runs.iterdir():
        if not Path("/proc", old.name).exists() or old.name == str(os.getpid()):
            shutil.rmtree(old, ignore_errors=True)
    run_dir = runs / str(os.getpid())
    run_dir.mkdir()
    return run_dir
