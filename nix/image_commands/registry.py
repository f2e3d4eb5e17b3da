"""Image in a registry: its reference, its digest, and documents attached to it by digest."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from image_commands.image import Image


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
        return Reference(self.repository, f"@{digest}", self.plain_http)


def inspected(image: Image, reference: Reference, *what: str) -> bytes:
    """Return what skopeo inspect prints of an image in a registry."""
    options = ["--tls-verify=false"] if reference.plain_http else []
    command = [image.tools["skopeo"], "inspect", "--raw", *options, *what, f"docker://{reference}"]
    done = subprocess.run(command, stdout=subprocess.PIPE)
    if done.returncode:
        raise SystemExit(f"{reference}: not to be had from the registry")
    return done.stdout


def resolve(image: Image, reference: Reference) -> Reference:
    """Return the reference by digest, so that a tag that moves meanwhile changes nothing."""
    return reference.at(f"sha256:{hashlib.sha256(inspected(image, reference)).hexdigest()}")


def require_same(image: Image, reference: Reference) -> None:
    """Fail unless the registry's image is the one of this ./result, in any compression."""
    config = json.loads(inspected(image, reference, "--config"))
    layers = [layer["diff_ids"] for layer in image.layers]
    if config.get("rootfs", {}).get("diff_ids") != layers:
        raise SystemExit(f"{reference}: has other layers than {image.reference}")
    if config.get("config") != image.about["image-config"]:
        raise SystemExit(f"{reference}: is configured otherwise than {image.reference}")


def attach(image: Image, reference: Reference, media_type: str, document: dict[str, Any]) -> None:
    """Attach a document to an image's digest, as OCI 1.1 has it: a manifest with a subject.

    oras keeps the index at the tag ``sha256-<digest>`` where a registry has no referrers API.
    """
    name = media_type.rpartition("/")[2].replace("+", ".")
    with TemporaryDirectory() as directory:
        Path(directory, name).write_text(json.dumps(document))
        options = ["--plain-http"] if reference.plain_http else []
        # What oras would write else: the time, by which two equal documents would differ.
        options += ["--annotation", f"org.opencontainers.image.created={image.created}"]
        command = [image.tools["oras"], "attach", "--no-tty", "--artifact-type", media_type]
        command += [*options, str(reference), f"{name}:{media_type}"]
        done = subprocess.run(command, cwd=directory, stdout=subprocess.PIPE)
    if done.returncode:
        raise SystemExit(f"{reference}: cannot attach {media_type}")
    print(f"attached {media_type}", file=sys.stderr)
