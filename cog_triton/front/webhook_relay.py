"""Webhook relay: coglet posts to a loopback port of the front, which posts to the webhook itself.

So the front sees every address, and webhooks are what Cog's documentation says, by HTTP and HTTPS:
in order, start and end at once, output and logs at most once in 500 ms, the end retried. coglet
0.23.1 posts each event in a task of its own and throttles no output: 100 tokens are 100 posts,
which overtake one another. Each event is a snapshot of the whole prediction, so that the newest
stands for all before it.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import unquote

from cog_triton import errors
from cog_triton.errors import InvalidArgument
from cog_triton.front.access import is_loopback
from cog_triton.front.gate import Gate, cog_refusal
from cog_triton.front.http_protocol import Connections, PublicPort
from cog_triton.front.listener import Listener
from cog_triton.front.message import Answer, Limits, Refused, Request, end_to_end
from cog_triton.settings import Settings
from cog_triton.system.ports import BACKLOG, bind
from cog_triton.system.public_addresses import (
    HTTP_URL,
    Address,
    Resolver,
    host_rules,
    in_networks,
    is_public,
    names_host,
    plain_address,
    resolve_host,
)
from cog_triton.system.redaction import redact_address

if TYPE_CHECKING:
    from cog_triton.front.webhook_client import WebhookClient

_MAX_URL = 8192
_TARGET = re.compile(r"/(?P<key>\w+)/(?P<name>\w+)/(?P<ends>[01])/(?P<url>[^/?]+)", re.ASCII)
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_OURS = frozenset({b"host", b"accept-encoding"})
_LIMITS = Limits(body_bytes=64 << 20)
_ALL_BYTES = 256 << 20
_RESOLVING = 8
_MOST = 4096
_MOST_HELD_BYTES = 256 << 20
_MOST_FAILING = 1024
_MOST_FAILING_BYTES = 64 << 20
_LATE_S = 30.0
"""How late an event may come after the end: coglet's own time limit of a post."""
_POLL_S = 0.02
_INTERVAL_S = 0.5
_TIMEOUT_S = 10.0
_LAST_TIMEOUT_S = 30.0
_RETRIES = 12
_BACKOFF_S = 0.1
_RETRIED = frozenset({429, 500, 502, 503, 504})  # Cog's own list, of its webhooks
_FORGOTTEN_S = 3600.0
_OUTPUT = b'"output":'
_RUNNING = (b'"status":"starting"', b'"status":"processing"')
"""As coglet writes them; within a string of JSON the quotation marks would be escaped."""
_log = logging.getLogger(__name__)

Post = Callable[[bytes, float], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class WebhookRules:
    """Hosts that webhooks may go to.

    Without `hosts`: every host with public addresses only, and loopback ones with `loopback`. Else
    only those named: a host name, ``*.domain`` (not the domain itself), an address or network, or
    ``*`` for every host.
    """

    hosts: tuple[str, ...] = ()
    loopback: bool = False

    @classmethod
    def of(cls, settings: Settings) -> WebhookRules:
        """Rules of WEBHOOK_HOSTS; loopback is allowed where only this machine reaches Cog."""
        return cls(host_rules(settings.webhook_hosts), loopback=is_loopback(settings.cog_host))

    def allow_address(self, address: Address) -> bool:
        """Whether a host with `address` is allowed."""
        if self.hosts:
            return in_networks(self.hosts, address)
        if plain_address(address).is_loopback:
            return self.loopback
        return is_public(address)


def check_webhook(
    url: str, rules: WebhookRules, resolve: Resolver = resolve_host
) -> tuple[Address, ...]:
    """Check the `webhook` of a request; returns the host's addresses, all of them allowed.

    Raises:
        InvalidArgument: not an http(s) URL, or its host is not allowed. The text is the same for a
            host that is unknown and one that is private, so that it tells nothing of the network.
    """
    if (parts := HTTP_URL.fullmatch(url)) is None:
        raise InvalidArgument(f"webhook={redact_address(url)[:200]!r}: must be an http(s):// URL")
    if len(parts[0]) > _MAX_URL:
        raise InvalidArgument(f"webhook: {len(parts[0])} characters; must be at most {_MAX_URL}")
    host = parts["host"].strip("[]").rstrip(".").lower()
    addresses = tuple(ipaddress.ip_address(text) for text in resolve(host))
    if names_host(rules.hosts, host):  # whatever its addresses
        return addresses
    if addresses and all(map(rules.allow_address, addresses)):
        return addresses
    rule = "must be one of WEBHOOK_HOSTS" if rules.hosts else "has no public address"
    raise InvalidArgument(
        f"webhook={redact_address(str(url))[:200]!r}: its host {rule}; WEBHOOK_HOSTS of the server"
        " names the hosts that webhooks may go to"
    )


class Delivery:
    """Sends what is offered, one webhook at a time; holds the first, the newest and the last."""

    def __init__(
        self,
        url: str,
        post: Post,
        failed: Callable[[Delivery], None],
        ended: Callable[[Delivery], None],
        *,
        tells_end: bool,
    ) -> None:
        """Calls `failed` whenever the end was not taken and is tried again, `ended` once.

        Without `tells_end`, the last event says only that no other follows.
        """
        self._shown = redact_address(url)[:200]
        self._post = post
        self._failed = failed
        self._ended = ended
        self._tells_end = tells_end
        self._first = self._newest = self._last = self._in_flight = b""
        self._length = 0
        self._begun = self._warned = False
        self.over = False
        """Whether the prediction has ended."""
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + _INTERVAL_S
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._on_done)

    @property
    def held_bytes(self) -> int:
        """Bytes of what waits, or is on its way."""
        return sum(map(len, (self._first, self._newest, self._last, self._in_flight)))

    def offer(self, event: bytes) -> None:
        """Take an event, unless a newer one was taken.

        Logs and output only grow, and a metric is recorded once, so that the longer one is newer.
        """
        if self.over:
            return
        if not any(mark in event for mark in _RUNNING):
            self.over = True
            if self._tells_end:
                self._last, self._newest = event, b""
        elif not (self._begun or self._first) and _OUTPUT not in event:
            self._first = event
        elif len(event) > self._length:
            self._newest = event
        self._length = max(self._length, len(event))
        self._changed.set()

    def drop_newest(self) -> int:
        """Drop what waits between the first event and the last, which repeats it; its bytes."""
        size, self._newest = len(self._newest), b""
        if size:
            self._warn("too much is held for all webhooks; an event is left out")
            self._changed.set()
        return size

    def give_up(self, reason: str) -> None:
        """Send nothing more."""
        if self._last:
            _log.error("webhook %r: the end is not delivered: %s", self._shown, reason)
        self._first = self._newest = self._last = b""
        self._task.cancel()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._ended(self)
        if not task.cancelled() and (error := task.exception()):
            _log.error("webhook %r: the server failed", self._shown, exc_info=error)

    async def _run(self) -> None:
        while event := await self._next():
            self._begun, self._in_flight = True, event
            if failure := await self._try(event, _TIMEOUT_S):
                self._warn(failure[0])
            event = self._in_flight = b""
            self._due = self._loop.time() + _INTERVAL_S
        for retry in range(_RETRIES + 1):
            if not self._last or (failure := await self._try(self._last, _LAST_TIMEOUT_S)) is None:
                break
            reason, is_transient = failure
            if not is_transient or retry == _RETRIES:
                self.give_up(reason)
                break
            _log.warning("webhook %r: %s; trying again", self._shown, reason)
            self._failed(self)
            await asyncio.sleep(_BACKOFF_S * 2 ** min(retry + 1, 10))
        self._last = b""

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("webhook %r: %s", self._shown, reason)

    async def _next(self) -> bytes:
        while True:
            self._changed.clear()
            rest = self._due - self._loop.time() if self._newest else _FORGOTTEN_S
            if self._first:
                event, self._first = self._first, b""
                return event
            if rest <= 0:
                event, self._newest = self._newest, b""
                return event
            if self.over and not self._newest:
                return b""
            try:
                await asyncio.wait_for(self._changed.wait(), rest)
            except TimeoutError:
                if not self._newest:  # its Cog has died
                    return b""

    async def _try(self, event: bytes, seconds: float) -> tuple[str, bool] | None:
        """Why it was not taken, if it was not, and whether it may be the next time."""
        try:
            status = await self._post(event, seconds)
        except InvalidArgument as error:
            return str(error), False
        except OSError as error:
            return str(error), True
        if 200 <= status < 300:
            return None
        return f"HTTP {status}", status in _RETRIED


class WebhookRelay(Gate):
    """Gate and registry behind the loopback port, a delivery for each prediction with a webhook."""

    refusal = staticmethod(cog_refusal)

    def __init__(self, rules: WebhookRules, resolve: Resolver = resolve_host) -> None:
        self._rules = rules
        self._resolve = resolve
        # Its own: names that are resolved slowly hold up nothing else.
        self._threads = ThreadPoolExecutor(_RESOLVING, "webhooks")
        self._key = secrets.token_hex(16)
        self._port = 0
        self._listener: Listener | None = None
        self._connections = Connections(_LIMITS.connections, _ALL_BYTES)
        self._client: WebhookClient | None = None
        self._deliveries: dict[str, Delivery] = {}
        self._failing: dict[Delivery, None] = {}
        self._held_bytes = 0
        """At least what all deliveries hold, counted anew whenever that seems too much."""
        self._ended: set[str] = set()

    def start(self) -> None:
        listening = bind("webhooks", "127.0.0.1", 0, BACKLOG)
        self._port = listening.getsockname()[1]
        port = PublicPort(self, _LIMITS, self._connections)
        self._listener = Listener(listening, port.connection)

    async def check(self, url: str) -> Sequence[Address]:
        """Allowed addresses of a webhook's host; raises E1005 unless webhooks may go there."""
        check = partial(check_webhook, url, self._rules, self._resolve)
        return await asyncio.get_running_loop().run_in_executor(self._threads, check)

    async def expect(self, url: str) -> None:
        """Raise E1005 unless webhooks may go to `url`; before the first, make the client.

        Raises E2100 where it cannot be made, for want of the certificates that a variable names.
        """
        await self.check(url)
        if self._client is None:
            client = await asyncio.get_running_loop().run_in_executor(self._threads, self._connect)
            self._client = self._client or client

    def address(self) -> str:
        """Where coglet posts the webhooks of one prediction, to be completed by `prepared`."""
        return f"http://127.0.0.1:{self._port}/{self._key}/{secrets.token_hex(8)}/"

    @property
    def pending(self) -> int:
        """Predictions with webhooks that are still to be delivered."""
        return sum(each.held_bytes > 0 for each in self._deliveries.values())

    async def drained(self, more: Callable[[], bool]) -> None:
        """Wait, as long as `more` says so, until nothing is pending."""
        while (self._connections.busy or self.pending) and more():
            await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        """Listen no more; what is pending is given up, with a line in the log."""
        if self._listener is not None:
            self._listener.close()
        self._connections.abort_all()
        for delivery in tuple(self._deliveries.values()):
            delivery.give_up("the server stops")
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._client is not None:
            await self._client.close()

    async def decide(self, request: Request) -> Answer:
        target = _TARGET.fullmatch(request.path)
        if target is None or not hmac.compare_digest(target["key"], self._key):
            raise Refused(404, errors.NotFound("no webhook"))
        name = target["name"]
        if name in self._ended or self._client is None:
            return Answer(200, b"")
        self._make_room(len(request.body))
        if (delivery := self._deliveries.get(name)) is None:
            if len(self._deliveries) >= _MOST:  # coglet tries the end again
                raise Refused(503, errors.Overloaded(f"{_MOST} webhooks are undelivered"))
            url = unquote(target["url"])
            headers = [pair for pair in end_to_end(request.headers) if pair[0] not in _OURS]
            delivery = self._deliveries[name] = Delivery(
                url,
                partial(self._client.post, url, headers),
                self._on_failure,
                partial(self._on_end, name),
                tells_end=target["ends"] == "1",
            )
        delivery.offer(request.body)
        return Answer(200, b"")

    def _connect(self) -> WebhookClient:
        from cog_triton.front.webhook_client import WebhookClient  # httpx takes 0.2 s

        try:
            return WebhookClient(self.check)
        except OSError as error:
            named = [name for name in _CERTIFICATES if name in os.environ]
            what = " or ".join(named) or "the certificates of the system"
            raise errors.TritonUnknownError(
                f"webhooks cannot be sent: {what}: {error.strerror or error}"
            ) from error

    def _make_room(self, size: int) -> None:
        """Bound what all deliveries hold: events amid predictions are dropped, the latest first.

        Raises E2107 where `size` bytes more are too many nevertheless.
        """
        self._held_bytes += size
        if self._held_bytes <= _MOST_HELD_BYTES:
            return
        deliveries = self._deliveries.values()
        self._held_bytes = size + sum(each.held_bytes for each in deliveries)
        for delivery in reversed(deliveries):
            if self._held_bytes <= _MOST_HELD_BYTES:
                return
            self._held_bytes -= delivery.drop_newest()
        if self._held_bytes > _MOST_HELD_BYTES:
            self._held_bytes -= size
            held = f"{_MOST_HELD_BYTES >> 20} MiB of webhooks are undelivered"
            raise Refused(503, errors.Overloaded(held))

    def _on_failure(self, delivery: Delivery) -> None:
        """Bound what waits for receivers that are gone: the oldest is given up."""
        self._failing[delivery] = None
        while (
            len(self._failing) > _MOST_FAILING
            or sum(each.held_bytes for each in self._failing) > _MOST_FAILING_BYTES
        ):
            oldest = next(iter(self._failing))
            del self._failing[oldest]
            oldest.give_up("too many others are not taken either")

    def _on_end(self, name: str, delivery: Delivery) -> None:
        del self._deliveries[name]
        self._failing.pop(delivery, None)
        if delivery.over:
            self._ended.add(name)
            asyncio.get_running_loop().call_later(_LATE_S, self._ended.discard, name)
