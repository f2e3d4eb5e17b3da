"""tritonserver process: started with all ranks or failing fast, stopped, and killed with us."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from secrets import token_hex, token_urlsafe
from typing import Any, Self

import httpx

from cog_triton.engines import step_pipe
from cog_triton.engines.base import rendered_engine
from cog_triton.engines.engine_spec import EngineSpec
from cog_triton.errors import CogTritonError, InvalidArgument, TritonStartFailed, TritonUnavailable
from cog_triton.processes.engine_fleet import EngineFleet
from cog_triton.processes.engine_replicas import ONE, EngineReplicas
from cog_triton.settings import Settings
from cog_triton.settings.addresses import url_host
from cog_triton.system import log_format, process_tuning, reaper
from cog_triton.system.gpus import VISIBLE_GPUS
from cog_triton.system.host_memory import OomKills
from cog_triton.system.redaction import without_secrets
from cog_triton.system.work_dir import new_shm_prefix, work_dir_errors
from cog_triton.triton import installation, launch, liveness
from cog_triton.triton.grpc_relay import GrpcRelay
from cog_triton.triton.model_repository import ENGINE_MODEL, read_config
from cog_triton.triton.request_streams import ModelInput, model_inputs

_HINTS = {
    "Unable to initialize shared memory key": (
        "/dev/shm is too small, or full: each model needs at least 1 MB there, and what crosses"
        " between them; make it larger (docker run --shm-size=1g)"
    ),
    "Failed to create temporary directory for Python environments": (
        "/tmp cannot be written: Triton's Python backend needs it; mount a tmpfs there"
    ),
    "UnicodeEncodeError: 'ascii' codec": (
        "a path has characters beyond ASCII, which Triton's Python does not take here: set"
        " COG_TRITON_WORK_DIR and ENGINE_DIR to paths without them"
    ),
    "No space left on device": "a disk, or /dev/shm, is full: free some space",
    "Cannot allocate memory": "memory is short: give it more, or serve a smaller engine",
    "std::bad_alloc": "memory is short: give it more, or serve a smaller engine",
}


def hint(log: str) -> str:
    """What to do, with a colon, by the text of `log`; blank if nothing is known."""
    for sign, found in _HINTS.items():
        if sign in log:
            return f"{found}: "
    return ""


_SAFE = re.compile(r"[\w/.+,:@%=^-]+")
_SHM = Path("/dev/shm")


def shell_safe(path: Path, shm_prefix: str, hosts: str = "") -> Path:
    """`path` itself if a shell takes it as one word, else a link to it, which goes with the server.

    Names in /dev/shm that begin with `shm_prefix` are removed when the server has ended.

    Raises:
        InvalidArgument: ranks run on other machines, `hosts`, which have no such link.
    """
    if _SAFE.fullmatch(str(path)):
        return path
    if hosts:
        raise InvalidArgument(
            f"{str(path)!r}: with MPI_HOSTS={hosts!r} it must be of letters, digits and"
            " / . + , : @ % = ^ _ -; set COG_TRITON_WORK_DIR to another directory"
        )
    link = _SHM / f"{shm_prefix}{token_hex(3)}"
    link.symlink_to(path, target_is_directory=True)
    return link


_log = logging.getLogger(__name__)
_POLL_S = 0.02
_TAIL_LINES = 25
_ATTEMPTS = 3
_CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
_ACTIVE = re.compile(
    r'^nv_trt_llm_request_metrics\{(?=[^}]*model="tensorrt_llm")[^}]*"active"[^}]*\} (\d+)',
    re.MULTILINE,
)
_PORT_IN_USE = re.compile(r"Socket '\S*:(\d+)' already in use")


class TritonClient:
    """Readiness probe of the Triton of `settings`; its connections belong to one event loop."""

    def __init__(self, settings: Settings) -> None:
        host, port = url_host(settings.triton_host), settings.triton_metrics_port
        self._metrics_url = f"http://{host}:{port}/metrics"
        self._http = httpx.AsyncClient(base_url=settings.triton_url, timeout=None, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def is_ready(self) -> bool:
        """Whether Triton reports all models as loaded; dead stubs go unnoticed. Has no timeout."""
        try:
            response = await self._http.get("/v2/health/ready")
        except httpx.TransportError:
            return False
        return response.status_code == 200

    async def active_requests(self) -> int | None:
        """Requests in the engine inside tritonserver, by its metrics; None if they do not say."""
        try:
            answer = await self._http.get(self._metrics_url)
        except httpx.TransportError:
            return None
        found = _ACTIVE.findall(answer.text)
        return sum(map(int, found)) if found else None


class TritonServer:
    """A tritonserver of one or more ranks on a rendered repository, logging to ``triton.log``."""

    def __init__(
        self,
        settings: Settings,
        repository: Path,
        work_dir: Path,
        world_size: int = 1,
        secrets: Collection[str] = (),
        replicas: EngineReplicas = ONE,
    ) -> None:
        """`world_size` is the number of ranks to start, from `launch.world_size`.

        `secrets` are the variables of our environment with secrets that Triton's processes get,
        `replicas` the engines of one that runs in a process.
        """
        self._secrets = secrets
        self._settings = settings
        self._world_size = world_size
        self._stop_signal = signal.SIGTERM
        self._repository = repository
        self._work_dir = work_dir
        self.log = work_dir / "triton.log"
        self._process: reaper.Reaped | None = None
        self._processes: liveness.ProcessLiveness | None = None
        self.engines: EngineFleet | None = None
        """Engine processes, of an engine that runs in one; they outlive tritonserver."""
        if (spec := self._engine_spec()) is not None:
            self.engines = EngineFleet(work_dir, spec, replicas, spare=settings.spare_engine)
        self.steps_key = token_urlsafe(32)
        """Secret of its model ``engine_steps``."""
        self._grpc_socket = Path()
        self._relay: GrpcRelay | None = None
        if not (settings.cog_triton_rank or settings.has_tenants):  # it asks for no key
            self._relay = GrpcRelay(settings.triton_grpc_port, lambda: self._grpc_socket)
        self._oom_kills = OomKills()
        self._crash: signal.Signals | None = None
        self._was_ready = False

    def _engine_spec(self) -> EngineSpec | None:
        """The engine of the rendered repository; None if it computes inside tritonserver."""
        model = self._repository / ENGINE_MODEL
        engine = rendered_engine(model)
        if engine is None:
            return None
        rendered = read_config(model / "config.pbtxt").parameters
        parameters = {name: rendered[name].string_value for name in rendered}
        return EngineSpec.of(engine, parameters, "python3")  # the stubs' own: the first in PATH

    @property
    def alive(self) -> bool:
        """Whether the process runs; ignores its models' stubs."""
        return self._process is not None and self._process.poll() is None

    @property
    def grpc_target(self) -> str:
        """gRPC address of the Triton that was started last."""
        return f"unix:{self._grpc_socket}"

    def engine_inputs(self) -> Mapping[str, ModelInput]:
        """Inputs of the engine's model."""
        return model_inputs(read_config(self._repository / ENGINE_MODEL / "config.pbtxt"))

    @property
    def root_pid(self) -> int:
        """Process id of the common ancestor of Triton's processes; only while it is started."""
        assert self._process is not None
        return self._process.process.pid

    async def start(
        self, is_ready: Callable[[], Awaitable[bool]], probe: Callable[[], Awaitable[None]]
    ) -> None:
        """Start, wait for readiness, and verify it with `probe`, a real request.

        Raises E2106 with the last log lines as soon as the process dies, or after
        TRITON_START_TIMEOUT; no process is left then. Triton crashes in some 1 of 100 starts on a
        busy machine, so the first start that ends so is tried again. The log of the previous start
        is kept as ``triton.previous.log``. The first start also opens TRITON_GRPC_PORT, which is
        served while this event loop runs, until `stop`.
        """
        try:
            for attempt in range(_ATTEMPTS, 0, -1):
                await self._launch()
                try:
                    await self.wait_until_ready(is_ready, probe)
                    break
                except TritonStartFailed as error:
                    if self._was_ready or self._crash is None or attempt == 1 or self.oom_hint():
                        raise
                    _log.warning(
                        "Triton crashed at its start (%s, attempt %d of %d), and is started again:"
                        " %s",
                        self._crash.name,
                        _ATTEMPTS + 1 - attempt,
                        _ATTEMPTS,
                        error.detail,
                    )
                    self.kill()
            if not self._settings.cog_triton_rank:  # another rank's may be still to come
                self._processes = liveness.ProcessLiveness(self.root_pid)
            if self._relay is not None:
                await self._relay.start()
        except BaseException:
            self.kill()
            self.kill_engines()
            raise
        self._was_ready = True

    async def _launch(self) -> None:
        """Start the process, and the engines if need be."""
        self._processes = None
        if self.log.exists():
            self.log.replace(self.log.with_name("triton.previous.log"))
        self._oom_kills = OomKills()
        with work_dir_errors(self._settings.work_dir):
            triton = installation.find_installation(
                self._work_dir, self._settings.tritonserver, self._settings.tritonserver_backend_dir
            )
        prefix = new_shm_prefix(self._work_dir)
        self._grpc_socket = launch.grpc_socket(prefix)
        self._grpc_socket.parent.mkdir(mode=0o700)
        hosts = self._settings.mpi_hosts or ""
        backends = shell_safe(triton.backend_directory, prefix, hosts)
        command = launch.launch_command(
            self._settings,
            replace(triton, backend_directory=backends),
            shell_safe(self._repository, prefix, hosts),
            self._work_dir,
            prefix,
            self._world_size,
        )
        self._stop_signal = command.stop_signal
        environment = without_secrets(command.environment, self._secrets)
        if self.engines is not None:
            self.engines.start(environment)
            # Engine processes do without: what computes has other needs of malloc.
            malloc = process_tuning.malloc_variables()
            environment = {**malloc, **environment, **self.engines.variables}
            environment[VISIBLE_GPUS] = ""  # else it holds half a GB of each, and computes nothing
        descriptor, form = log_format.own()
        descriptor = os.dup(descriptor)
        told = f"{form}:{log_format.name(descriptor)}" if self._settings.log_requests else "off"
        environment[log_format.DESCRIPTOR_VARIABLE] = told
        environment[step_pipe.KEY_VARIABLE] = self.steps_key
        with self.log.open("wb") as log, os.fdopen(descriptor, "wb"):
            self._process = reaper.spawn(
                command.argv,
                grace=launch.EXIT_TIMEOUT_S + 1,
                unlink_shm=prefix,
                env=environment,
                stdout=log,
                stderr=log,
                pass_fds=[descriptor],
            )

    async def wait_until_ready(
        self, is_ready: Callable[[], Awaitable[bool]], probe: Callable[[], Awaitable[None]]
    ) -> None:
        """Wait for readiness, and verify it with `probe`; raises E2106 as `start` does."""
        self._crash = None
        watch = asyncio.ensure_future(self._wait_for_exit())
        broken = asyncio.ensure_future(self.wait_for_failure())
        failed = asyncio.ensure_future(self._wait_for_engines_failure())
        ready = asyncio.ensure_future(self._probe_when_ready(is_ready, probe))
        waits: set[asyncio.Future[Any]] = {watch, broken, failed, ready}
        try:
            await asyncio.wait(
                waits,
                timeout=self._settings.triton_start_timeout,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if failed.done():
                raise TritonStartFailed(failed.result())
            if ready.done() and isinstance(ready.exception(), TritonUnavailable):
                await asyncio.wait({watch}, timeout=1)
            if watch.done():
                code = watch.result()
                self._crash = next((one for one in _CRASHES if code == 128 + one), None)
                ended = (
                    f"was ended by {self._crash.name}"
                    if self._crash
                    else f"exited with code {code}"
                )
                raise TritonStartFailed(
                    f"{self._hint()}tritonserver {ended} during start-up"
                    f"{self._port_in_use_hint()}{self.oom_hint()}; its last lines (of {self.log}):"
                    f"\n{self.log_tail()}"
                )
            if broken.done():
                raise TritonStartFailed(f"{broken.result()} during start-up")
            if not ready.done():
                raise TritonStartFailed(
                    f"Triton was not ready within {self._settings.triton_start_timeout:g} s"
                    f" (TRITON_START_TIMEOUT); its last lines (of {self.log}):\n{self.log_tail()}"
                )
            try:
                ready.result()
            except CogTritonError as error:
                raise TritonStartFailed(f"the first request failed: {error}") from error
        finally:
            for wait in waits:
                wait.cancel()

    async def wait_for_failure(self) -> str:
        """Wait until a process of it was stopped or, since it was ready, has died; says which."""
        if self._processes is None:
            return await liveness.wait_until_stopped(self.root_pid)
        return await self._processes.wait_for_failure()

    async def stop(self) -> None:
        """Let running requests end for a few seconds, then kill what is left; end the engines."""
        await self.stop_triton()
        if self._relay is not None:
            await self._relay.stop()
        if self.engines is not None:
            await self.engines.stop()

    async def stop_triton(self) -> None:
        """Stop all but the engine processes; running requests get some seconds."""
        if self._process is None:
            return
        self._process.signal(self._stop_signal)
        deadline = time.monotonic() + launch.EXIT_TIMEOUT_S + 2
        while self.alive and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        self.kill()

    def kill(self) -> None:
        """Kill its processes but for the engines'; none is left when this returns."""
        if self._process is not None:
            self._process.kill()
            self._process = self._processes = None

    def kill_engines(self) -> None:
        """Kill the engine processes; the next start starts others."""
        if self.engines is not None:
            self.engines.kill()

    def log_tail(self) -> str:
        """The last lines of the log, without tables of options and models."""
        lines = self._log_text().splitlines()
        shown = [line for line in lines if line.strip() and not line.startswith(("|", "+"))]
        return "\n".join(shown[-_TAIL_LINES:])

    def oom_hint(self) -> str:
        """Suffix of an error: that the kernel killed a process for want of memory; else blank."""
        return self._oom_kills.hint()

    def _hint(self) -> str:
        return hint(self._log_text())

    def _log_text(self) -> str:
        """The log; blank if there is none, as the disk is full, or no descriptor is left."""
        try:
            return self.log.read_text("utf-8", "replace")
        except OSError:
            return ""

    def _port_in_use_hint(self) -> str:
        """Error text for a port that another program took since it was checked, else blank."""
        found = _PORT_IN_USE.search(self._log_text())
        for name, (_, port) in self._settings.triton_ports.items():
            if found and int(found[1]) == port:
                return f": {name}={port} is in use by now; choose another with {name}=..."
        return ""

    async def _wait_for_exit(self) -> int:
        assert self._process is not None
        while (code := self._process.poll()) is None:
            await asyncio.sleep(_POLL_S)
        return code

    async def _wait_for_engines_failure(self) -> str:
        """See `EngineFleet.wait_until_failed`; never without engine processes."""
        if self.engines is None:
            await asyncio.get_running_loop().create_future()
        assert self.engines is not None
        return await self.engines.wait_until_failed()

    async def _probe_when_ready(
        self, is_ready: Callable[[], Awaitable[bool]], probe: Callable[[], Awaitable[None]]
    ) -> None:
        while not await is_ready():
            await asyncio.sleep(_POLL_S)
        await probe()
