"""EngineCore's process, begun before vLLM's front end is imported: both import at once.

vLLM starts EngineCore by multiprocessing's "spawn" once it has imported everything and read the
model, and the new process imports all of it again: 9 s of a start of 8B. Here the process is there
from the host's beginning. It opens nothing, and waits on the pipe by which "spawn" says what to
run; it then has the environment of that moment. With the host, it ends at once, however that ends.

Run by ``-m``, this module is that process. Interfaces: multiprocessing.popen_spawn_posix of Python
3.11 and 3.12, ``vllm.v1.engine.utils`` of vLLM 0.33, prctl(2).
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import io
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import context, popen_spawn_posix, reduction, resource_tracker, spawn, util
from typing import Any

_log = logging.getLogger(__name__)
_MARK = "--multiprocessing-fork"  # by which multiprocessing knows a process of its own
_LENGTH = 4
_PR_SET_PDEATHSIG = 1
_THREADS = "OMP_NUM_THREADS"
_MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "torch._inductor.standalone_compile",
)
_EXECUTORS = ("vllm.v1.executor.uniproc_executor", "vllm.v1.executor.multiproc_executor")
_REGISTRY = "vllm.model_executor.models.registry"


class CoreProcess:
    """A process that imports what EngineCore needs, and waits to become it."""

    def __init__(self, architectures: Sequence[str], *, ranks: int) -> None:
        """Start it, from the main thread: with that it ends."""
        self._sentinel, child_end = os.pipe()
        order_end, self._order = os.pipe()
        tracker = resource_tracker.getfd() or 0
        self._executable = spawn.get_executable()
        arguments = [tracker, order_end, os.getpid(), _EXECUTORS[ranks > 1], *architectures]
        command = [*spawn.get_command_line()[:-3], "-m", __name__, _MARK, *map(str, arguments)]
        try:
            self.pid = util.spawnv_passfds(
                os.fsencode(self._executable), command, [tracker, order_end, child_end]
            )
        finally:
            os.close(order_end)
            os.close(child_end)
        self._offered = True

    @contextmanager
    def offered(self) -> Iterator[None]:
        """Context in which the first EngineCore that vLLM starts becomes this process.

        Where this vLLM starts it in another way, that is a warning, and it starts as ever.
        """
        try:
            utils = _seam()
        except (ImportError, AttributeError, ValueError) as error:
            _log.warning("EngineCore imports once vLLM starts it, not before: %s", error)
            self._end()
            yield
            return
        ask = utils.get_mp_context

        def offering() -> Any:
            asked = ask()
            return _Offering(self) if type(asked) is context.SpawnContext else asked

        utils.get_mp_context = offering
        try:
            yield
        finally:
            utils.get_mp_context = ask
            self._end()

    def take(self, popen: _Popen, process: Any) -> bool:
        """Have it run a multiprocessing process; returns whether it does.

        It cannot where it has died, or what it is to run comes with descriptors.
        """
        if not self._offered or spawn.get_executable() != self._executable:
            return False
        order = io.BytesIO()
        context.set_spawning_popen(popen)
        try:
            reduction.dump(spawn.get_preparation_data(process.name), order)
            reduction.dump(process, order)
        finally:
            context.set_spawning_popen(None)
        if popen._fds:
            return False
        environment = json.dumps(dict(os.environ)).encode()
        with suppress(ChildProcessError, BrokenPipeError):
            if os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                with open(self._order, "wb", closefd=False) as pipe:
                    pipe.write(len(environment).to_bytes(_LENGTH, "big"))
                    pipe.write(environment)
                    pipe.write(order.getbuffer())
                self._offered = False
                popen.begun(self.pid, self._sentinel, self._order)
                return True
        _log.warning("the process that imports for EngineCore has died; it starts as ever")
        return False

    def _end(self) -> None:
        """End it, unless it is EngineCore by now."""
        if self._offered:
            self._offered = False
            os.close(self._order)
            os.close(self._sentinel)
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)


class _Offering(context.SpawnContext):
    """multiprocessing's context "spawn", whose first process is one that is there already."""

    def __init__(self, core: CoreProcess) -> None:
        self._core = core

    def Process(self, *given: Any, **named: Any) -> Any:  # type: ignore[override]  # noqa: N802
        made = _Process(*given, **named)
        made.core = self._core
        return made


class _Process(context.SpawnProcess):
    core: CoreProcess

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - the base class calls it so
        return _Popen(process_obj)

    def __reduce__(self) -> Any:
        state = {name: value for name, value in vars(self).items() if name != "core"}
        return object.__new__, (context.SpawnProcess,), state


class _Popen(popen_spawn_posix.Popen):
    """multiprocessing's handle of a process, which may have been started before.

    `_fds` are descriptors that what it is to run comes with.
    """

    _fds: list[int]

    def begun(self, pid: int, sentinel: int, order: int) -> None:
        """Take a process, the end of the pipe that tells its death, and that of its order."""
        self.pid, self.sentinel = pid, sentinel
        self.finalizer = util.Finalize(self, util.close_fds, (sentinel, order))  # type: ignore[attr-defined]

    def _launch(self, process_obj: Any) -> None:
        if not process_obj.core.take(self, process_obj):
            self._fds.clear()
            super()._launch(process_obj)  # type: ignore[misc]


def _seam() -> Any:
    """vLLM's module that starts EngineCore; raises ValueError where that does it in another way."""
    from vllm.v1.engine import utils

    manager = utils.CoreEngineProcManager.__init__
    if unused := {"get_mp_context", "Process", "start"} - set(manager.__code__.co_names):
        raise ValueError(f"{manager.__qualname__} does not call {', '.join(sorted(unused))}")
    if taken := list(inspect.signature(utils.get_mp_context).parameters):
        raise ValueError(f"get_mp_context takes {taken}")
    return utils


def main() -> None:
    """Import, wait, and be EngineCore."""
    _, _, tracker, order, host, executor, *architectures = sys.argv
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != int(host):  # it has died before we asked
        return
    began = time.monotonic()
    for name in (*_MODULES, executor):
        with suppress(ImportError):  # another version's
            importlib.import_module(name)
    with suppress(ImportError, AttributeError):
        models = importlib.import_module(_REGISTRY).ModelRegistry.models
        for architecture in architectures:
            if (module := getattr(models.get(architecture), "module_name", None)) is not None:
                importlib.import_module(module)
    imported = time.monotonic()
    pipe = int(order)
    length = int.from_bytes(_read(pipe, _LENGTH), "big")
    _take_over(json.loads(_read(pipe, length)))
    waited = time.monotonic() - imported
    print(f"EngineCore: imported in {imported - began:.2f} s, then waited {waited:.2f} s",
          file=sys.stderr, flush=True)  # fmt: skip
    spawn.spawn_main(pipe_handle=pipe, tracker_fd=int(tracker))


def _read(pipe: int, length: int) -> bytes:
    """So many bytes, and no more; ends the process where the host is gone."""
    read = b""
    while len(read) < length:
        if not (more := os.read(pipe, length - len(read))):
            sys.exit(1)
        read += more
    return read


def _take_over(environment: Mapping[str, str]) -> None:
    """Take the host's environment, as a process that is spawned now would have it."""
    before = os.environ.get(_THREADS)
    os.environ.clear()
    os.environ.update(environment)
    threads = os.environ.get(_THREADS)
    if threads is not None and threads != before and "torch" in sys.modules:  # which read it then
        sys.modules["torch"].set_num_threads(int(threads))


if __name__ == "__main__":
    main()
