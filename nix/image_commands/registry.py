"""Image in a registry: pushed, with documents attached to its digest, signed and verified.

cosign signs with a key and without Sigstore's public services. A signature, the SBOM and the
provenance each become a Sigstore bundle, attached to the image's digest. No transparency log is
written or asked, so nothing leaves for other places than the registry, and nobody but the key's
owner can tell when something was signed.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from image_commands import documents
from image_commands.image import Image

# Compressed once and pulled often: skopeo's zstd has four levels, and 9 is its third.
LEVEL = 9
_TERMS = "it holds NVIDIA's libraries under NVIDIA's terms: docs/licences.md says who may push it"
_OFFLINE = ["--use-signing-config=false", "--tlog-upload=false", "--yes"]
_PASSWORD = "COSIGN_PASSWORD"


@dataclass(frozen=True)
class Reference:
    """Reference of an image in a registry, with the registry's name written out."""

    repository: str
    """Registry and path."""
    suffix: str
    """``:tag``, ``@digest`` or nothing."""
    plain_http: bool
    """Whether the registry is asked over HTTP, which --dest-tls-verify=false says."""

    @classmethod
    def parse(cls, text: str, options: list[str]) -> Reference:
        """Read a reference as docker does: without a registry it is on docker.io."""
        path, at, digest = text.partition("@")
        head, slash, last = path.rpartition("/")
        name, colon, tag = last.partition(":")
        repository = f"{head}{slash}{name}"
        first = repository.partition("/")[0]
        if not slash or not (set(".:") & set(first) or first == "localhost"):
            repository = f"docker.io/{repository}" if slash else f"docker.io/library/{repository}"
        plain = bool({"--dest-tls-verify=false", "--tls-verify=false"} & set(options))
        return cls(repository, f"{at}{digest}" or f"{colon}{tag}", plain)

    def __str__(self) -> str:
        return self.repository + self.suffix

    def at(self, digest: str) -> Reference:
        """Return the same repository's image of a digest."""
        return replace(self, suffix=f"@{digest}")


def push(image: Image, arguments: Namespace, options: list[str]) -> int:
    """Copy the image, attach SBOM and provenance, sign if there is a key; prints the digest."""
    reference = Reference.parse(arguments.reference, options)
    if holds_nvidia(image):
        print(f"{image.reference}: {_TERMS}", file=sys.stderr)
    compression = arguments.compression or "zstd"
    chosen = ["--format", "oci", "--dest-compress-format", compression]
    if arguments.compression:
        # Else a layer that is there in another compression is taken as it is.
        chosen.append("--dest-force-compress-format")
    if compression != "gzip":
        chosen += ["--dest-compress-level", str(LEVEL)]
    with TemporaryDirectory() as directory:
        file = Path(directory, "digest")
        chosen += ["--digestfile", str(file)]
        if code := image.copy(f"docker://{reference}", *chosen, *options).wait():
            return code
        digest = file.read_text().strip()
    target = reference.at(digest)
    if not arguments.image_only:
        _attach(image, target, "application/spdx+json", documents.sbom(image))
        statement = documents.provenance(image, target.repository, digest)
        _attach(image, target, "application/vnd.in-toto+json", statement)
    if arguments.key:
        sign(image, target, arguments.key)
    print(target)
    return 0


def holds_nvidia(image: Image) -> bool:
    """Whether the image is for GPUs, by its label."""
    return image.labels.get("cog-triton.sm", "cpu") != "cpu"


def sign(image: Image, reference: Reference, key: str) -> int:
    """Sign an image that was pushed, with its SBOM and provenance."""
    target = _resolve(image, reference)
    _require_same(image, target)
    with _private_key(image, key) as (path, environment), TemporaryDirectory() as directory:
        options = ["--key", path, *_OFFLINE]
        _cosign(image, ["sign", *options], target, **environment)
        for kind, document in (
            ("spdxjson", documents.sbom(image)),
            ("slsaprovenance1", documents.predicate(image)),
        ):
            file = Path(directory, kind)
            file.write_text(json.dumps(document))
            attested = ["--type", kind, "--predicate", str(file)]
            _cosign(image, ["attest", *options, *attested], target, **environment)
    print(f"signed {target}", file=sys.stderr)
    return 0


def verify(image: Image, reference: Reference, key: str) -> int:
    """Check signature, SBOM and provenance of an image in a registry against a public key."""
    target = _resolve(image, reference)
    options = ["--key", key, "--insecure-ignore-tlog"]
    _cosign(image, ["verify", *options], target)
    for kind in ("spdxjson", "slsaprovenance1"):
        _cosign(image, ["verify-attestation", *options, "--type", kind], target)
    print(f"verified {target}: signature, SBOM and provenance (no transparency log was asked)")
    return 0


def _inspect(image: Image, reference: Reference, *what: str) -> bytes:
    options = ["--tls-verify=false"] if reference.plain_http else []
    command = [image.tools["skopeo"], "inspect", "--raw", *options, *what, f"docker://{reference}"]
    done = subprocess.run(command, stdout=subprocess.PIPE)
    if done.returncode:
        raise SystemExit(f"{reference}: not to be had from the registry")
    return done.stdout


def _resolve(image: Image, reference: Reference) -> Reference:
    """Return the reference by digest, so that a tag that moves meanwhile changes nothing."""
    return reference.at(f"sha256:{hashlib.sha256(_inspect(image, reference)).hexdigest()}")


def _require_same(image: Image, reference: Reference) -> None:
    """Fail unless the registry's image is the one of this ./result, in any compression."""
    config = json.loads(_inspect(image, reference, "--config"))
    layers = [layer["diff_ids"] for layer in image.about["layers"]]
    if config.get("rootfs", {}).get("diff_ids") != layers:
        raise SystemExit(f"{reference}: has other layers than {image.reference}")
    if config.get("config") != image.about["image-config"]:
        raise SystemExit(f"{reference}: is configured otherwise than {image.reference}")


def _attach(image: Image, reference: Reference, media_type: str, document: dict[str, Any]) -> None:
    """Attach a document to an image's digest, as OCI 1.1 has it: a manifest with a subject.

    oras keeps the index at the tag ``sha256-<digest>`` where a registry has no referrers API.
    """
    name = media_type.rpartition("/")[2].replace("+", ".")
    with TemporaryDirectory() as directory:
        Path(directory, name).write_text(json.dumps(document))
        options = ["--plain-http"] if reference.plain_http else []
        # What oras would write else: the time, by which two equal documents would differ.
        options += ["--annotation", f"org.opencontainers.image.created={image.about['created']}"]
        command = [image.tools["oras"], "attach", "--no-tty", "--artifact-type", media_type]
        command += [*options, str(reference), f"{name}:{media_type}"]
        done = subprocess.run(command, cwd=directory, stdout=subprocess.PIPE)
    if done.returncode:
        raise SystemExit(f"{reference}: cannot attach {media_type}")
    print(f"attached {media_type}", file=sys.stderr)


def _cosign(
    image: Image, arguments: list[str], reference: Reference | None, **environment: str
) -> None:
    """Run cosign, on an image if one is named; what it prints is shown when it fails."""
    target = [str(reference)] if reference else []
    if reference and reference.plain_http:
        target.insert(0, "--allow-http-registry")
    command = [image.tools["cosign"], *arguments, *target]
    done = subprocess.run(command, capture_output=True, env={**os.environ, **environment})
    if done.returncode:
        sys.stderr.buffer.write(done.stderr)
        raise SystemExit(f"cosign {arguments[0]}: {reference or 'the key'}: failed")


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
        command = ["import-key-pair", "--key", str(Path(key).resolve())]
        command += ["--output-key-prefix", f"{directory}/signing"]
        _cosign(image, command, None, **environment)
        yield f"{directory}/signing.key", environment
