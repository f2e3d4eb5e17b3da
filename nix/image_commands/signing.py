"""Signatures by cosign, with a key and without Sigstore's public services.

A signature, the SBOM and the provenance each become a Sigstore bundle, attached to the image's
digest. No transparency log is written or asked, so nothing leaves for other places than the
registry, and nobody but the key's owner can tell when something was signed.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from image_commands import provenance, sbom
from image_commands.image import Image
from image_commands.registry import Reference, require_same, resolve

_OFFLINE = ["--use-signing-config=false", "--tlog-upload=false", "--yes"]
_PASSWORD = "COSIGN_PASSWORD"


def sign(image: Image, reference: Reference, key: str) -> int:
    """Sign an image that was pushed, with its SBOM and provenance."""
    target = resolve(image, reference)
    require_same(image, target)
    documents = {"spdxjson": sbom.document(image), "slsaprovenance1": provenance.predicate(image)}
    with _private_key(image, key) as (path, environment), TemporaryDirectory() as directory:
        options = ["--key", path, *_OFFLINE]
        _cosign(image, target, "sign", *options, environment=environment)
        for kind, document in documents.items():
            file = Path(directory, kind)
            file.write_text(json.dumps(document))
            options += ["--type", kind, "--predicate", str(file)]
            _cosign(image, target, "attest", *options, environment=environment)
    print(f"signed {target}", file=sys.stderr)
    return 0


def verify(image: Image, reference: Reference, key: str) -> int:
    """Check signature, SBOM and provenance of an image in a registry against a public key."""
    target = resolve(image, reference)
    options = ["--key", key, "--insecure-ignore-tlog"]
    _cosign(image, target, "verify", *options)
    for kind in ("spdxjson", "slsaprovenance1"):
        _cosign(image, target, "verify-attestation", *options, "--type", kind)
    print(f"verified {target}: signature, SBOM and provenance (no transparency log was asked)")
    return 0


def _cosign(
    image: Image,
    reference: Reference,
    verb: str,
    *options: str,
    environment: dict[str, str] | None = None,
) -> None:
    """Run cosign on an image; what it prints is shown when it fails."""
    http = ["--allow-http-registry"] if reference.plain_http else []
    command = [image.tools["cosign"], verb, *options, *http, str(reference)]
    done = subprocess.run(command, capture_output=True, env={**os.environ, **(environment or {})})
    if done.returncode:
        sys.stderr.buffer.write(done.stderr)
        raise SystemExit(f"cosign {verb}: {reference}: failed")


@contextmanager
def _private_key(image: Image, key: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the path of a key in cosign's format, and variables for cosign.

    cosign signs with no plain PEM key, such as openssl writes, but imports one: under a password
    that nobody keeps, into a directory that goes with the command.
    """
    if "BEGIN ENCRYPTED" in Path(key).read_text():
        if _PASSWORD not in os.environ:
            raise SystemExit(f"{_PASSWORD} is not set: the password of {key}, empty if it has none")
        yield key, {}
        return
    with TemporaryDirectory() as directory:
        environment = {_PASSWORD: secrets.token_urlsafe()}
        command = [image.tools["cosign"], "import-key-pair", "--key", str(Path(key).resolve())]
        command += ["--output-key-prefix", f"{directory}/signing"]
        variables = {**os.environ, **environment}
        done = subprocess.run(command, capture_output=True, env=variables)
        if done.returncode:
            sys.stderr.buffer.write(done.stderr)
            raise SystemExit(f"{key}: cosign cannot read this key")
        yield f"{directory}/signing.key", environment
