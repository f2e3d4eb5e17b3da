"""Documents about an image, printed or attached to it: SBOM, provenance, what it is."""

from __future__ import annotations

import hashlib
import json
import subprocess
from typing import Any

from image_commands import provenance, sbom
from image_commands.image import Image
from image_commands.registry import Reference, attach

SPDX = "application/spdx+json"
IN_TOTO = "application/vnd.in-toto+json"


def print_sbom(image: Image) -> int:
    """Print the SPDX document."""
    return _print(sbom.document(image))


def print_provenance(image: Image) -> int:
    """Print the statement about the image's ID, which docker shows; the digest is a push's."""
    command = [image.tools["skopeo"], "--insecure-policy", "inspect", "--config", "--raw"]
    config = subprocess.run([*command, f"nix:{image.image}"], check=True, stdout=subprocess.PIPE)
    identity = f"sha256:{hashlib.sha256(config.stdout).hexdigest()}"
    return _print(provenance.statement(image, image.reference, identity))


def print_image(image: Image) -> int:
    """Print its name, its configuration and its layers with their sizes."""
    layers = [
        {"digest": layer["digest"], "size": layer["size"], **layer["History"]}
        for layer in image.layers
    ]
    shown = {"reference": image.reference, "config": image.about["image-config"], "layers": layers}
    return _print(shown, sort_keys=True)


def attach_all(image: Image, target: Reference) -> None:
    """Attach the documents to the image of a digest."""
    attach(image, target, SPDX, sbom.document(image))
    digest = target.suffix.removeprefix("@")
    attach(image, target, IN_TOTO, provenance.statement(image, target.repository, digest))


def _print(document: dict[str, Any], *, sort_keys: bool = False) -> int:
    print(json.dumps(document, indent=2, sort_keys=sort_keys))
    return 0
