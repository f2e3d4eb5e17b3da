"""Leased engine: a `TokenEngine` whose engine process is replaced when it dies."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from cog_triton.backend.engine_client import EngineClient
from cog_triton.engines.base import EngineStats
from cog_triton.engines.step_items import OWNER
from cog_triton.errors import CogTritonError, TritonUnavailable
from cog_triton.keeper.engine_lease import EngineLease
from cog_triton.keeper.keeper_messages import EngineSpec
from cog_triton.system import local_socket

_log = logging.getLogger(__name__)
_ATTEMPTS = 3
_STABLE_S = 5.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 30.0


class LeasedEngine:
    """Client of the engine process that the keeper leases to this stub; see `TokenEngine`.

    When the process dies, all requests in it end with E2105, and so do those that come before the
    keeper has leased another.
    """

    def __init__(
        self,
        keeper: str,
        spec: EngineSpec,
        owner: int = 0,
        replica: int = 0,
        others_serve: Callable[[], bool] = lambda: False,
    ) -> None:
        """`owner` is the tritonserver to stop when no other engine can be had; 0 for none.

        While `others_serve`, beside this `replica`, it goes on without, and tries again. Raises the
        coded error of an engine that does not load, or RuntimeError when there is none.
        """
        self._spec = spec
        self._owner = owner
        self._coalesce = dict(spec.parameters).get("coalesce") != "false"
        self._obtain_lease = partial(EngineLease, keeper, spec, owner, replica)
        self._others_serve = others_serve
        self._replica = replica
        self._lease = self._obtain_lease()
        self._leased_at = 0.0
        self._pause = 0.0
        self._closing = False
        self._closed = threading.Event()
        self._returning: threading.Thread | None = None
        self._on_kv_cache: Callable[[], None] = lambda: None
        try:
            self._client = self._connect()
        except BaseException:
            self._lease.release()
            raise

    @property
    def serves(self) -> bool:
        """Whether its process is there."""
        return not self._client.ended

    @property
    def on_kv_cache(self) -> Callable[[], None]:
        """See `TokenEngine.on_kv_cache`."""
        return self._on_kv_cache

    @on_kv_cache.setter
    def on_kv_cache(self, function: Callable[[], None]) -> None:
        self._on_kv_cache = self._client.on_kv_cache = function

    def submit(self, handle: int, request: Any, emit: Callable[[Any], None]) -> None:
        """See `TokenEngine.submit`."""
        self._client.submit(handle, request, emit)

    def cancel(self, handle: int) -> None:
        """See `TokenEngine.cancel`."""
        self._client.cancel(handle)

    def stats(self) -> EngineStats:
        """See `TokenEngine.stats`."""
        return self._client.stats()

    def close(self) -> None:
        """End the lease; the process may serve another stub."""
        if self._closing:
            return
        self._closing = True
        self._closed.set()
        self._client.close()
        self._lease.release()
        if self._returning is not None:
            self._returning.join()

    def _connect(self) -> EngineClient:
        for _ in range(_ATTEMPTS):
            address = self._lease.obtain()
            try:
                connection = local_socket.connect(address)
                connection.send(OWNER)
                slots = int(connection.recv())
            except (OSError, EOFError):
                continue  # it has died just now
            self._leased_at = time.monotonic()
            return EngineClient(connection, slots, self._on_death, coalesce=self._coalesce)
        raise TritonUnavailable(f"{_ATTEMPTS} engine processes died as soon as they were leased")

    def _on_death(self) -> None:
        self._returning = threading.Thread(target=self._return, name="engine-lease", daemon=True)
        self._returning.start()

    def _return(self) -> None:
        """Lease another engine; without one, stop tritonserver, so that its supervisor notices."""
        dead = self._client
        lasted = time.monotonic() - self._leased_at >= _STABLE_S
        self._pause = 0.0 if lasted else self._longer_pause()
        while True:
            if self._others_serve() and self._closed.wait(self._pause):
                return
            try:
                client = self._connect()
                break
            except (CogTritonError, RuntimeError, OSError, EOFError) as error:
                if self._closing:
                    return
                if not self._others_serve():
                    _log.error("the engine is gone, and no other can be had: %s", error)
                    self._stop_owner()
                    return
                self._pause = self._longer_pause()
                wait = f"the next try is in {self._pause:g} s"
                _log.error("engine %d is not back, and %s: %s", self._replica, wait, error)
                self._lease.release()
                with suppress(OSError):  # the keeper is gone: so will the others be
                    self._lease = self._obtain_lease()
        client.on_kv_cache = self._on_kv_cache
        self._client = client
        dead.close()
        if self._closing:
            client.close()

    def _longer_pause(self) -> float:
        return min(2 * self._pause or _FIRST_PAUSE_S, _LAST_PAUSE_S)

    def _stop_owner(self) -> None:
        if self._owner:
            with suppress(ProcessLookupError):
                os.kill(self._owner, signal.SIGTERM)
