"""TLS of the front door: a certificate chain and its key, read again whenever they change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from cog_triton.errors import CogTritonError, InvalidArgument

_PERIOD_S = 1.0
_LOG = logging.getLogger(__name__)


class FileReader(Protocol):
    """What the door has read from files."""

    def refresh(self) -> None:
        """Read the files again if they have changed; blocks."""


async def keep_current(readers: Sequence[FileReader]) -> None:
    """Have files read again when they change, until cancelled."""
    while True:
        await asyncio.sleep(_PERIOD_S)
        for reader in readers:
            await asyncio.to_thread(reader.refresh)


class Certificate:
    """Server certificate; one that cannot be read leaves that of before, with a line in the log."""

    def __init__(self, chain: Path, key: Path) -> None:
        """Raises E1005 where the files are wrong."""
        self._files = (chain, key)
        self._seen = self._signature()
        self.context = self._load()

    def refresh(self) -> None:
        """See `FileReader`; connections that are open keep what they have."""
        if (seen := self._signature()) == self._seen:
            return
        self._seen = seen
        try:
            self.context = self._load()
        except CogTritonError as error:
            _LOG.error("the certificate of before stays, as the new one is wrong: %s", error)
        else:
            _LOG.info("a new certificate is in use")

    def _load(self) -> ssl.SSLContext:
        chain, key = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(chain, key, password=lambda: b"")
        except (OSError, ValueError) as error:  # those of ssl, too
            raise InvalidArgument(
                f"TLS_CERT_FILE={chain}, TLS_KEY_FILE={key}: must be a PEM chain and its key,"
                f" without a password: {getattr(error, 'reason', None) or error}"
            ) from None
        return context

    def _signature(self) -> object:
        try:
            found = [file.stat() for file in self._files]
        except OSError as error:
            return error.errno
        return [(one.st_ino, one.st_mtime_ns, one.st_size) for one in found]
