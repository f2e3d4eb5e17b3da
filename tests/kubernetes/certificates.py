"""Certificates of a test's cluster: an authority, the apiserver's, and an administrator's."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_ADDRESSES = ("127.0.0.1", "10.96.0.1", "10.10.0.1")


def write(directory: Path) -> None:
    """Write ca, server and admin, each a .crt and a .key, good for two days."""
    directory.mkdir(parents=True)
    authority = ec.generate_private_key(ec.SECP256R1())
    issuer = _name("cog-triton-test-ca")
    for name, subject in (
        ("ca", issuer),
        ("server", _name("kube-apiserver")),
        ("admin", _name("admin", "system:masters")),
    ):
        key = authority if name == "ca" else ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=5))
            .not_valid_after(now + timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=name == "ca", path_length=None), critical=True)
        )
        if name == "server":
            addresses = [x509.IPAddress(ipaddress.ip_address(one)) for one in _ADDRESSES]
            names = x509.SubjectAlternativeName([x509.DNSName("kubernetes"), *addresses])
            builder = builder.add_extension(names, critical=False)
        made = builder.sign(authority, hashes.SHA256())
        (directory / f"{name}.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
        (directory / f"{name}.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )


def _name(common: str, organization: str | None = None) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, common)]
    if organization is not None:
        parts.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    return x509.Name(parts)
