"""Connectors of an engine client: where an engine is, and the next one when it has died."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from cog_triton.errors import CogTritonError, TritonUnavailable
from cog_triton.keeper.engine_lease import EngineLease
from cog_triton.keeper.keeper_messages import EngineSpec

_log = logging.getLogger(__name__)
_RETRY_S = 0.02
_ATTEMPTS = 3
_STABLE_S = 5.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 30.0

Locate = Callable[[], str]
"""Address of the engine's socket; raises OSError or EOFError while there is none."""


class Connector(ABC):
    """Finds one engine of a client, and its successors."""

    on_address: Callable[[str], None]
    """Links the engine at an address; raises OSError or EOFError when it has died."""
    others_serve: Callable[[], bool]
    """Whether other engines of the client take requests."""

    @abstractmethod
    def start(self) -> None:
        """Begin."""

    @abstractmethod
    def lost(self) -> None:
        """The engine has hung up: find the one that takes its place. Returns at once."""

    @abstractmethod
    def close(self) -> None:
        """Find no more engines; what was linked stays so."""

    def release(self) -> None:
        """Let go of the engine, which is linked no more."""
        return


class GuestConnector(Connector):
    """Finds an engine that is leased to a sibling stub, on a thread of its own.

    Triton loads its models concurrently and is ready when all of them are, so only requests sent
    before that are refused, and those that come while an engine that died is replaced.
    """

    def __init__(self, locate: Locate) -> None:
        self._locate = locate
        self._closing = threading.Event()
        self._wanted = threading.Event()
        self._thread = threading.Thread(target=self._run, name="connector", daemon=True)

    def start(self) -> None:
        """See `Connector.start`; waits for nothing."""
        self._wanted.set()
        self._thread.start()

    def lost(self) -> None:
        """See `Connector.lost`."""
        self._wanted.set()

    def close(self) -> None:
        """See `Connector.close`."""
        self._closing.set()
        self._wanted.set()
        self._thread.join()

    def _run(self) -> None:
        while self._wanted.wait() and not self._closing.is_set():
            self._wanted.clear()
            try:
                self.on_address(self._locate())
            except (OSError, EOFError):
                self._wanted.set()
                self._closing.wait(_RETRY_S)


class LeaseConnector(Connector):
    """Leases an engine from the keeper; the process may serve another stub afterwards.

    When none can be had any more, tritonserver is stopped, so that its supervisor notices.
    """

    def __init__(self, keeper: str, spec: EngineSpec, owner: int = 0, replica: int = 0) -> None:
        """`owner` is the tritonserver to stop when no other engine can be had; 0 for none.

        While others serve beside this `replica`, it goes on without, and tries again.
        """
        self._owner = owner
        self._replica = replica
        self._obtain_lease = partial(EngineLease, keeper, spec, owner, replica)
        self._lease = self._obtain_lease()
        self._leased_at = 0.0
        self._pause = 0.0
        self._closing = threading.Event()
        self._returning: threading.Thread | None = None

    def start(self) -> None:
        """See `Connector.start`.

        Raises the coded error of an engine that does not load, or RuntimeError when there is none.
        """
        try:
            self._connect()
        except BaseException:
            self._lease.release()
            raise

    def lost(self) -> None:
        """See `Connector.lost`."""
        if not self._closing.is_set():
            self._returning = threading.Thread(
                target=self._return, name="engine-lease", daemon=True
            )
            self._returning.start()

    def close(self) -> None:
        """See `Connector.close`."""
        self._closing.set()

    def release(self) -> None:
        """See `Connector.release`: the lease ends."""
        self._lease.release()
        if self._returning is not None:
            self._returning.join()

    def _connect(self) -> None:
        for _ in range(_ATTEMPTS):
            address = self._lease.obtain()
            try:
                self.on_address(address)
            except (OSError, EOFError):
                continue  # it has died just now
            self._leased_at = time.monotonic()
            return
        raise TritonUnavailable(f"{_ATTEMPTS} engine processes died as soon as they were leased")

    def _return(self) -> None:
        lasted = time.monotonic() - self._leased_at >= _STABLE_S
        self._pause = 0.0 if lasted else self._longer_pause()
        while True:
            if self.others_serve() and self._closing.wait(self._pause):
                return
            try:
                self._connect()
                return
            except (CogTritonError, RuntimeError, OSError, EOFError) as error:
                if self._closing.is_set():
                    return
                if not self.others_serve():
                    _log.error("the engine is gone, and no other can be had: %s", error)
                    self._stop_owner()
                    return
                self._pause = self._longer_pause()
                wait = f"the next try is in {self._pause:g} s"
                _log.error("engine %d is not back, and %s: %s", self._replica, wait, error)
                self._lease.release()
                with suppress(OSError):  # the keeper is gone: so will the others be
                    self._lease = self._obtain_lease()

    def _longer_pause(self) -> float:
        return min(2 * self._pause or _FIRST_PAUSE_S, _LAST_PAUSE_S)

    def _stop_owner(self) -> None:
        if self._owner:
            with suppress(ProcessLookupError):
                os.kill(self._owner, signal.SIGTERM)
