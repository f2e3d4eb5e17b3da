"""tritonserver process: started with all ranks or failing fast, stopped, and killed with us."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from secrets import token_hex, token_urlsafe

import httpx

from cog_triton.engines import step_pipe
from cog_triton.engines.base import ENGINE
from cog_triton.engines.engine_spec import EngineSpec
from cog_triton.errors import CogTritonError, InvalidArgument, TritonStartFailed, TritonUnavailable
from cog_triton.processes.orders import StartEngines, StartTriton, TritonChanged
from cog_triton.processes.parent_link import ParentLink
from cog_triton.processes.waits import first_done
from cog_triton.settings import Settings
from cog_triton.settings.addresses import url_host
from cog_triton.system import log_format, process_tuning, reaper
from cog_triton.system.gpus import ONE, VISIBLE_GPUS, EngineReplicas
from cog_triton.system.host_memory import OomKills
from cog_triton.system.process_state import process_state
from cog_triton.system.redaction import without_secrets
from cog_triton.system.work_dir import new_shm_prefix, work_dir_errors
from cog_triton.triton import installation, launch
from cog_triton.triton.grpc_relay import GrpcRelay
from cog_triton.triton.model_repository import ENGINE_MODEL, read_config
from cog_triton.triton.request_streams import ModelInput, model_inputs

_SERVER = "tritonserver"
_STUB = "triton_python_backend_stub"
_LOOK_S = 0.25
_DEAD = ("", "Z", "X")
_ANONYMOUS = re.compile(r"^RssAnon:\s+(\d+) kB", re.M)


async def wait_for_death(processes: Mapping[int, str]) -> str:
    """Wait until one of these processes has died, be it before; describes which, by its name.

    The parent watches for a SIGSTOP.
    """
    loop = asyncio.get_running_loop()
    descriptors: list[int] = []
    died = asyncio.Event()
    try:
        for pid in processes:
            try:
                descriptors.append(os.pidfd_open(pid))
            except ProcessLookupError:
                died.set()
            else:
                loop.add_reader(descriptors[-1], died.set)
        while True:
            await died.wait()
            # A dying server takes its stubs along, so it is named first.
            for pid in sorted(processes, key=lambda pid: processes[pid] != _SERVER):
                if process_state(pid) in _DEAD:
                    return f"{processes[pid]} (process {pid}) has died"
            await asyncio.sleep(_LOOK_S)  # it could not be looked at
    finally:
        for descriptor in descriptors:
            loop.remove_reader(descriptor)
            os.close(descriptor)


def named_processes(root: int) -> dict[int, str]:
    """Every tritonserver and stub below the process `root`: its name for errors, by its id."""
    return {pid: name for pid in reaper.descendants(root) if (name := _name(pid)) is not None}


def anonymous_bytes(pid: int) -> int:
    """Resident memory of a process that no file backs, in bytes; 0 if there is no such process."""
    try:
        found = _ANONYMOUS.search(Path(f"/proc/{pid}/status").read_text("utf-8", "replace"))
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(found[1]) << 10 if found else 0


def _name(pid: int) -> str | None:
    """Name of a process for errors, None if it is neither a server nor a stub."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # A script has its interpreter as the first word.
    for place, word in enumerate(words[:2]):
        program = Path(word).name
        if program == _SERVER:
            return _SERVER
        if program == _STUB:
            model = Path(words[place + 1]).parent.parent.name if len(words) > place + 1 else "?"
            return f"the stub of {model}"
    return None


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
    return next((f"{found}: " for sign, found in _HINTS.items() if sign in log), "")


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
_AGAIN = "Triton crashed at its start (%s, attempt %d of %d), and is started again: %s"
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
        parent: ParentLink,
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
        self._repository = repository
        self._work_dir = parent.run_dir
        self.log = self._work_dir / "triton.log"
        self._triton = parent.triton
        self._processes: Mapping[int, str] = {}
        self.engines = parent.engines
        """Engine processes, of an engine that runs in one; they outlive tritonserver."""
        if (spec := self._engine_spec()) is not None:
            count, gpus, spare = replicas.count, replicas.gpus, settings.spare_engine
            directory = str(self._work_dir)
            self.engines.choose(StartEngines(spec, directory, "", {}, count, list(gpus), spare))
        self.steps_key = token_urlsafe(32)
        """Secret of its model ``engine_steps``."""
        self._grpc_socket = Path()
        self._relay: GrpcRelay | None = None
        if not (settings.cog_triton_rank or settings.has_tenants):  # it asks for no key
            self._relay = GrpcRelay(settings.triton_grpc_port, lambda: self._grpc_socket)
        self._oom_kills = OomKills()
        self._crash: signal.Signals | None = None
        self._attempts = _ATTEMPTS

    def _engine_spec(self) -> EngineSpec | None:
        """The engine of the rendered repository; None if it computes inside tritonserver."""
        path = self._repository / ENGINE_MODEL / "config.pbtxt"
        rendered = read_config(path).parameters if path.is_file() else {}
        parameters = {name: rendered[name].string_value for name in rendered}
        engine = parameters.pop(ENGINE, None)
        return EngineSpec.of(engine, parameters) if engine else None

    @property
    def grpc_target(self) -> str:
        """gRPC address of the Triton that was started last."""
        return f"unix:{self._grpc_socket}"

    def engine_inputs(self) -> Mapping[str, ModelInput]:
        """Inputs of the engine's model."""
        return model_inputs(read_config(self._repository / ENGINE_MODEL / "config.pbtxt"))

    @property
    def root_pid(self) -> int:
        """Process id of the common ancestor of Triton's processes; 0 if there are none."""
        return self._triton.root_pid

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
            for attempt in range(1, self._attempts + 1):
                await self._launch()
                try:
                    await self.wait_until_ready(is_ready, probe)
                    break
                except TritonStartFailed as error:
                    if self._crash is None or attempt == self._attempts or self.oom_hint():
                        raise
                    _log.warning(_AGAIN, self._crash.name, attempt, _ATTEMPTS, error.detail)
                    await self.kill()
            if not self._settings.cog_triton_rank:  # another rank's may be still to come
                self._processes = named_processes(self.root_pid)
            if self._relay is not None:
                await self._relay.start()
        except BaseException:
            await self.kill()
            await self.engines.kill()
            raise
        self._attempts = 1

    async def _launch(self) -> None:
        """Start the process, and the engines if need be; a Triton that stands is taken over."""
        self._processes = {}
        if (standing := self._triton.standing) is not None:
            self._triton.standing = None
            self._grpc_socket = launch.grpc_socket(standing.shm_prefix)
            self.steps_key = standing.environment[step_pipe.KEY_VARIABLE]
            self.engines.start(standing.environment)
            return
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
        triton = replace(triton, backend_directory=backends)
        models = shell_safe(self._repository, prefix, hosts)
        command = launch.launch_command(
            self._settings, triton, models, self._work_dir, prefix, self._world_size
        )
        environment = without_secrets(command.environment, self._secrets)
        if self.engines.chosen:
            self.engines.start(environment)
            # Engine processes do without: what computes has other needs of malloc.
            malloc = process_tuning.malloc_variables()
            environment = {**malloc, **environment, **self.engines.variables}
            environment[VISIBLE_GPUS] = ""  # else it holds half a GB of each, and computes nothing
        environment[step_pipe.KEY_VARIABLE] = self.steps_key
        _, form = log_format.own()
        requests = form if self._settings.log_requests else "off"
        argv, number, log = command.argv, command.stop_signal, str(self.log)
        await self._triton.start(StartTriton(argv, environment, number, prefix, log, requests))

    async def wait_until_ready(
        self, is_ready: Callable[[], Awaitable[bool]], probe: Callable[[], Awaitable[None]]
    ) -> None:
        """Wait for readiness, and verify it with `probe`; raises E2106 as `start` does."""
        self._crash = None
        limit = self._settings.triton_start_timeout

        async def probe_when_ready() -> None:
            while not await is_ready():
                await asyncio.sleep(_POLL_S)
            await probe()

        waits = self._wait_for_failure(), self.engines.wait_until_failed(), probe_when_ready()
        async with first_done(*waits, seconds=limit) as (broken, failed, ready):
            if failed.done():
                raise TritonStartFailed(failed.result())
            if ready.done() and isinstance(ready.exception(), TritonUnavailable):
                await asyncio.wait({broken}, timeout=1)
            if broken.done():
                if reason := broken.result().reason:
                    raise TritonStartFailed(f"{reason} during start-up")
                code = broken.result().code
                self._crash = next((one for one in _CRASHES if code == 128 + one), None)
                crashed = self._crash and f"was ended by {self._crash.name}"
                log = self._log_text()
                raise TritonStartFailed(
                    f"{hint(log)}tritonserver {crashed or f'exited with code {code}'} during"
                    f" start-up{self._port_in_use_hint(log)}{self.oom_hint()}{self.last_lines()}"
                )
            if not ready.done():
                late = f"Triton was not ready within {limit:g} s (TRITON_START_TIMEOUT)"
                raise TritonStartFailed(f"{late}{self.last_lines()}")
            if isinstance(error := ready.exception(), CogTritonError):
                raise TritonStartFailed(f"the first request failed: {error}") from error
            ready.result()

    async def wait_for_failure(self) -> str:
        """Wait until it has ended or, since it was ready, a process of it has died; says which."""
        return (await self._wait_for_failure()).reason or "tritonserver has died"

    async def _wait_for_failure(self) -> TritonChanged:
        died = wait_for_death(self._processes)
        async with first_done(self._triton.wait(), died) as (ended, found):
            return ended.result() if ended.done() else TritonChanged(reason=found.result())

    async def stop(self) -> None:
        """Let running requests end for a few seconds, then kill what is left, and the engines."""
        await self.stop_triton()
        if self._relay is not None:
            await self._relay.stop()
        await self.engines.kill()

    async def stop_triton(self) -> None:
        """Stop all but the engine processes; running requests get some seconds."""
        await self._triton.stop()

    async def kill(self) -> None:
        """Kill its processes but for the engines'; none is left when this returns."""
        await self._triton.stop(kills=True)

    def log_tail(self) -> str:
        """The last lines of the log, without tables of options and models."""
        lines = self._log_text().splitlines()
        shown = [line for line in lines if line.strip() and not line.startswith(("|", "+"))]
        return "\n".join(shown[-_TAIL_LINES:])

    def last_lines(self) -> str:
        """Suffix of an error: the last lines of the log."""
        return f"; its last lines (of {self.log}):\n{self.log_tail()}"

    def oom_hint(self) -> str:
        """Suffix of an error: that the kernel killed a process for want of memory; else blank."""
        return self._oom_kills.hint()

    def _log_text(self) -> str:
        """The log; blank if there is none, as the disk is full, or no descriptor is left."""
        try:
            return self.log.read_text("utf-8", "replace")
        except OSError:
            return ""

    def _port_in_use_hint(self, log: str) -> str:
        found = _PORT_IN_USE.search(log)
        for name, (_, port) in self._settings.triton_ports.items():
            if found and int(found[1]) == port:
                return f": {name}={port} is in use by now; choose another with {name}=..."
        return ""
