"""TLS of the front: a certificate chain and its key, read again whenever they change."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path

from cog_triton.errors import InvalidArgument
from cog_triton.front.file_reader import FileReader


class Certificate(FileReader):
    """Server certificate; connections that are open keep the one that they have."""

    most_bytes = 1 << 20
    kept = "the certificate of before stays, as the new one is wrong"
    renewed = "a new certificate is in use"
    context: ssl.SSLContext
    """What new connections have."""

    def __init__(self, chain: Path, key: Path) -> None:
        """Raises E1005 where the files are wrong."""
        self._files = (chain, key)
        super().__init__(f"TLS_CERT_FILE={chain}, TLS_KEY_FILE={key}")

    def files(self) -> Sequence[Path]:
        return self._files

    def take(self, data: object) -> None:
        """See `FileReader`; OpenSSL reads the files by itself."""
        chain, key = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(chain, key, password=lambda: b"")
        except (ssl.SSLError, ValueError) as error:
            raise InvalidArgument(
                f"TLS_CERT_FILE={chain}, TLS_KEY_FILE={key}: must be a PEM chain and its key,"
                f" without a password: {getattr(error, 'reason', None) or error}"
            ) from None
        self.context = context
