"""Rate limits of tenants: token buckets of requests and of tokens, a minute's worth each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from cog_triton.errors import Overloaded
from cog_triton.serving.tenants import Tenant

_MINUTE_S = 60.0


class TokenBucket:
    """Token bucket that is full at first, and may be overdrawn."""

    def __init__(self, now: float, per_minute: int) -> None:
        self._level = float(per_minute)
        self._since = now

    def wait(self, now: float, per_minute: int, wanted: float = 1) -> float:
        """Seconds until it holds so many; 0 where it does."""
        return max(0.0, (wanted - self.level(now, per_minute)) * _MINUTE_S / per_minute)

    def level(self, now: float, per_minute: int) -> float:
        """How many it holds; fewer than none where it is overdrawn."""
        gained = (now - self._since) * per_minute / _MINUTE_S
        self._level, self._since = min(per_minute, self._level + gained), now
        return self._level

    def take(self, count: int) -> None:
        """Take so many, whether or not they are there."""
        self._level -= count


class TenantLimits:
    """`requests_per_minute` and `tokens_per_minute` of each tenant.

    What a request will cost is not known before: it may begin while anything is left, and the
    next ones wait for what it took. Prompts count when they begin, outputs when they end.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, str], TokenBucket] = {}

    def begin(self, tenant: Tenant | None) -> None:
        """Count a request; raises E2107 beyond a limit, with the seconds until it may come."""
        if tenant is None:
            return
        for what in ("tokens", "requests"):
            limit = getattr(tenant, f"{what}_per_minute")
            if limit is None:
                continue
            wait = self._bucket(tenant, what, limit).wait(self._clock(), limit)
            if wait > 0:
                error = Overloaded(
                    f"{tenant.name} may have {limit} {what} a minute ({what}_per_minute of its"
                    f" key); try again in {wait:.1f} s"
                )
                error.retry_after = max(1.0, wait)
                raise error
        if (limit := tenant.requests_per_minute) is not None:
            self._bucket(tenant, "requests", limit).take(1)

    def used(self, tenant: Tenant | None, tokens: int) -> None:
        """Count tokens of a prompt or an output."""
        if tenant is not None and (limit := tenant.tokens_per_minute) is not None:
            self._bucket(tenant, "tokens", limit).take(tokens)

    def headers(self, tenant: Tenant | None) -> Iterator[tuple[bytes, bytes]]:
        """What a tenant has left of its limits, as OpenAI's API tells it."""
        if tenant is None:
            return
        for what in ("requests", "tokens"):
            if (limit := getattr(tenant, f"{what}_per_minute")) is None:
                continue
            bucket, now = self._bucket(tenant, what, limit), self._clock()
            left, full_s = bucket.level(now, limit), bucket.wait(now, limit, limit)
            told = {"limit": limit, "remaining": max(0, int(left)), "reset": f"{full_s:.1f}s"}
            for name, value in told.items():
                yield f"x-ratelimit-{name}-{what}".encode(), str(value).encode()

    def _bucket(self, tenant: Tenant, what: str, limit: int) -> TokenBucket:
        name = (tenant.name, what)
        if name not in self._buckets:
            self._buckets[name] = TokenBucket(self._clock(), limit)
        return self._buckets[name]
