"""Webhook proxy: forward proxy of Cog's parent, which connects to allowed addresses only.

Cog 0.23.1 posts webhooks by itself, resolves their hosts, and follows redirects. It honours proxy
variables, so each of its connections, also after a redirect, is made here, to an address that was
checked. Messages: RFC 9110 section 9.3.6 (CONNECT), RFC 9112 section 3.2.2 (absolute-form).
"""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import suppress
from urllib.parse import urlsplit

from cog_triton.door.webhooks import WebhookRules, check_webhook
from cog_triton.errors import InvalidArgument
from cog_triton.system.public_addresses import Resolver, resolve_host

_log = logging.getLogger(__name__)
_LINE = re.compile(rb"([A-Z]+) (\S+) (HTTP/1\.[01])\r\n")
_HOP_BY_HOP = (b"connection:", b"proxy-connection:", b"proxy-authorization:", b"keep-alive:")
_TIMEOUT_S = 15.0
_MAX_HEAD = 64 << 10
_CHUNK = 64 << 10


class WebhookProxy:
    """Forward proxy on a port of 127.0.0.1, for one event loop."""

    def __init__(self, rules: WebhookRules, resolve: Resolver = resolve_host) -> None:
        self._rules = rules
        self._resolve = resolve
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Listen; returns the port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_MAX_HEAD)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream: asyncio.StreamWriter | None = None
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _TIMEOUT_S)
            answers, upstream = await self._connect(head, writer)
            await _relay((reader, upstream), (answers, writer))
        except InvalidArgument as error:
            _log.warning("%s", error)
            _refuse(writer, b"403 Forbidden", str(error))
        except (OSError, asyncio.TimeoutError) as error:
            _refuse(writer, b"502 Bad Gateway", f"the webhook's host: {error or 'no answer'}")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            for each in (upstream, writer):
                if each is not None:
                    each.close()

    async def _connect(
        self, head: bytes, writer: asyncio.StreamWriter
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect for the request that begins with `head`; sends on what the host needs of it."""
        line = _LINE.match(head)
        if line is None:
            raise InvalidArgument("a webhook's request: not HTTP/1.1")
        method, target, version = line.groups()
        url = target.decode("latin-1")
        tunnel = method == b"CONNECT"
        checked = f"https://{url}/" if tunnel else url
        addresses = await asyncio.to_thread(check_webhook, checked, self._rules, self._resolve)
        parts = urlsplit(checked)
        port = parts.port or (443 if tunnel else 80)
        failure: OSError = OSError("its name has no address")
        for address in addresses:
            try:
                answers, upstream = await asyncio.wait_for(
                    asyncio.open_connection(str(address), port), _TIMEOUT_S
                )
            except OSError as error:
                failure = error
                continue
            if tunnel:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                path = parts._replace(scheme="", netloc="").geturl() or "/"
                upstream.write(b"%b %b %b\r\n" % (method, path.encode("latin-1"), version))
                upstream.write(_origin_headers(head[line.end() :]))
            return answers, upstream
        raise failure


def _origin_headers(headers: bytes) -> bytes:
    """`headers` for the host itself, which closes after its one answer: the next has its check."""
    kept = [
        line for line in headers.split(b"\r\n") if line and not line.lower().startswith(_HOP_BY_HOP)
    ]
    return b"\r\n".join([*kept, b"Connection: close", b"", b""])


def _refuse(writer: asyncio.StreamWriter, status: bytes, text: str) -> None:
    body = text.encode()
    writer.write(
        b"HTTP/1.1 %b\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\n"
        b"Connection: close\r\n\r\n%b" % (status, len(body), body)
    )


async def _relay(*ways: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    """Copy bytes both ways until either end has closed."""
    tasks = [asyncio.ensure_future(_copy(source, target)) for source, target in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while piece := await source.read(_CHUNK):
            target.write(piece)
            await target.drain()
