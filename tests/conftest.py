"""What all tests need of the process that they run in."""

from __future__ import annotations

import functools
import signal

from httpx._transports import default as _httpx_transport

# What a shell starts in the background ignores Ctrl-C, and what nohup starts a hang-up; and so
# would all that tests start.
for number, default in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)

# Each call of httpx.get reads all certificates of authorities, 26 ms of CPU, and tests ask servers
# on this machine many times a second, without TLS, while they wait for them.
_httpx_transport.create_ssl_context = functools.cache(_httpx_transport.create_ssl_context)  # type: ignore[attr-defined]
