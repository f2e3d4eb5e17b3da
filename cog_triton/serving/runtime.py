"""Serving runtime: an engine's tokenizer, its supervised Triton, and the text generator."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Self

from cog_triton.artifact import canary
from cog_triton.engines.base import EngineFamily
from cog_triton.errors import (
    CogTritonError,
    InvalidArgument,
    TritonStartFailed,
    TritonUnavailable,
    nearest,
)
from cog_triton.processes.parent_link import ParentLink
from cog_triton.serving.adapter_store import AdapterStore
from cog_triton.serving.admission import Admission, admission_for
from cog_triton.serving.engine_preparation import prepare_engine
from cog_triton.serving.generate import TextGenerator
from cog_triton.serving.generation import Observer
from cog_triton.serving.openai.parsers.borrowed import BorrowedParsers, borrow
from cog_triton.serving.supervisor import Supervisor
from cog_triton.settings import Settings
from cog_triton.text import chat_template
from cog_triton.text.generation_config import sampling_defaults
from cog_triton.text.tokenizer import EngineTokenizer
from cog_triton.triton.infer_stream import TokenTransport
from cog_triton.triton.model_repository import max_batch_size
from cog_triton.triton.request_streams import RequestStreams
from cog_triton.triton.server import TritonClient, TritonServer
from cog_triton.triton.step_stream import StepStreams

_log = logging.getLogger(__name__)

_STOPPING = "the server is stopping; try again"
_ABORT_GRACE_S = 2.0


class Runtime:
    """A running engine: tokenizer, supervised Triton and `generator`.

    `adapters` are its LoRA adapters, if it may have any, `sampling_defaults` the model's own of
    sampling parameters, `borrowed` parsers of vLLM. For metrics: `admission` counts requests,
    `supervisor` has Triton's state and restarts, `step_streams` the counts of steps if the engine
    has a process.
    """

    def __init__(
        self,
        settings: Settings,
        family: EngineFamily,
        tokenizer: EngineTokenizer,
        server: TritonServer,
        admission: Admission,
        on_failed: Callable[[CogTritonError], None],
        observer: Observer | None = None,
        adapters: AdapterStore | None = None,
        replicas: int = 1,
    ) -> None:
        """`on_failed` is called after the supervisor has given up.

        `replicas` is the number of engines.
        """
        self.settings = settings
        self.family = family
        self.tokenizer = tokenizer
        self.admission = admission
        self.adapters = adapters
        self.sampling_defaults = _sampling_defaults(settings, family)
        client = TritonClient(settings)
        self.borrowed: BorrowedParsers | None = None
        self.step_streams: StepStreams | None = None
        transport: TokenTransport
        if family.backend == "python":
            transport = self.step_streams = StepStreams(
                lambda: server.grpc_target,
                lambda: server.steps_key,
                settings.triton_timeout,
                family.classify_error,
                family.engine_request,
                replicas,
            )
        else:
            transport = RequestStreams(
                lambda: server.grpc_target,
                settings.triton_timeout,
                family.classify_error,
                family.encode_request,
                server.engine_inputs(),
            )
        engines = self.step_streams if replicas > 1 else None
        self.generator = TextGenerator(
            settings,
            family.limits,
            tokenizer,
            transport,
            family.classify_error,
            admission,
            on_failure=lambda: self.supervisor.check_engine(),
            observer=observer,
            resume_rules=family.resume_rules,
            priorities=family.abilities.priorities,
        )
        self.supervisor = Supervisor(
            settings, server, client, transport, self.generator.probe, admission, on_failed, engines
        )
        self._draining = False

    @classmethod
    async def start(
        cls,
        settings: Settings,
        parent: ParentLink,
        on_failed: Callable[[CogTritonError], None] = lambda error: None,
        observer: Observer | None = None,
    ) -> Self:
        """Load the engine and start Triton; raises the coded error that start-up ended with."""
        if settings.cog_triton_rank is not None:
            settings = _rank_0_settings(settings)
        # The checks ask nvidia-smi and read files, while the loop serves.
        loaded = parent.has_loaded
        prepared = await asyncio.to_thread(prepare_engine, settings, parent.run_dir, loaded=loaded)
        family, repository = prepared.family, prepared.repository
        tokenizer = EngineTokenizer.load(family.tokenizer_dir)
        if settings.chat_template is not None:
            tokenizer = tokenizer.with_template(settings.chat_template)
        if tokenizer.chat_template is not None:
            chat_template.POOL.warm_up()
        server = TritonServer(
            settings,
            repository,
            parent,
            prepared.world_size,
            family.secrets,
            prepared.replicas,
        )
        count = prepared.replicas.count
        admission = admission_for(settings, count * max_batch_size(repository))
        runtime = cls(
            settings,
            family,
            tokenizer,
            server,
            admission,
            on_failed,
            observer,
            prepared.adapters,
            count,
        )
        links = parent.run_dir / "parsers"
        borrowing = asyncio.create_task(
            asyncio.to_thread(borrow, settings, family, tokenizer, links)
        )
        try:
            await runtime.supervisor.start()
        except TritonStartFailed as error:
            borrowing.cancel()  # asyncio logs a failure that nobody waits for
            known = family.classify_start_failure(server.log.read_text("utf-8", "replace"))
            if known is None:
                raise
            raise known from error
        try:
            runtime.borrowed = await borrowing
            if settings.canary != "off":
                required = settings.canary == "require"
                await check_canary(family, runtime.generator, required=required)
            for name in prepared.adapters.adapters() if prepared.adapters else ():
                await runtime.generator.probe(name)
        except CogTritonError:
            await runtime.stop()
            raise
        return runtime

    async def stop(self) -> None:
        """Stop Triton and close every connection."""
        if self.borrowed is not None:
            self.borrowed.close()
        await self.supervisor.stop()

    def require_adapter(self, name: str) -> None:
        """Raise E1005 with the nearest one unless there is a LoRA adapter of this name."""
        known = self.adapters.adapters() if self.adapters else {}
        if name not in known:
            raise InvalidArgument(
                f"lora_name={name[:80]!r}: no such adapter{nearest(name, list(known))}"
            )

    def require_ready(self) -> None:
        """Raise E2105 while Triton is down or draining, and E2106 after the supervisor gave up."""
        if self.supervisor.error is not None:
            raise self.supervisor.error
        if self._draining:
            raise TritonUnavailable(_STOPPING)

    async def drain(self, seconds: float | None = None) -> None:
        """Graceful drain: reject new requests, fail those left after `seconds`.

        DRAIN_TIMEOUT limits it where no other limit is given. Until then an engine that dies is
        started again, as ever, and requests go on.
        """
        timeout = self.settings.drain_timeout if seconds is None else seconds
        self._draining = True
        self.admission.reject_new(TritonUnavailable(_STOPPING))
        if not await self.admission.wait_until_idle(timeout):
            self.admission.close(
                TritonUnavailable(
                    f"the server is stopping, and waited no longer than {timeout:g} s"
                    " (DRAIN_TIMEOUT); try again"
                )
            )
            await self.admission.wait_until_idle(_ABORT_GRACE_S)
        await self.supervisor.let_go()


def _sampling_defaults(settings: Settings, family: EngineFamily) -> Mapping[str, float]:
    """Defaults of sampling parameters by GENERATION_CONFIG, which the log tells."""
    if settings.generation_config == "none" or not family.abilities.generation:
        return {}
    found = sampling_defaults(family.generation_config(), family.abilities.sampling)
    if found:
        _log.info("requests that say nothing else have the model's own %s", found)
    return found


async def check_canary(family: EngineFamily, generator: TextGenerator, *, required: bool) -> None:
    """Send the canary of the engine directory, if it has one.

    A failure is logged, for another machine's arithmetic may break a near tie otherwise, and
    raised only if the answer is `required` (CANARY=require).

    Raises:
        CogTritonError: E2112 if the answer differs, or what the request failed with.
    """
    try:
        expected = canary.load(family.directory)
        if expected is None:
            return
        ids = await generator.greedy_ids(expected.input_ids, len(expected.output_ids))
        expected.require(ids)
    except CogTritonError as error:
        if required:
            raise
        _log.warning("%s", error)
    else:
        _log.info("the canary of %d tokens was answered as built", len(expected.output_ids))


def _rank_0_settings(settings: Settings) -> Settings:
    """Settings for rank 0 started alone: no restarts, since a rank cannot be restarted alone."""
    if settings.cog_triton_rank:
        raise InvalidArgument(
            f"COG_TRITON_RANK={settings.cog_triton_rank}: only rank 0 answers requests; start the"
            " others with `cog-triton serve --triton-only`"
        )
    return settings.model_copy(update={"triton_max_restarts": 0})
