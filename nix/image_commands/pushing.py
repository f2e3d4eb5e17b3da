"""Push to a registry: the image, then what is attached to its digest."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

from image_commands.copying import copy
from image_commands.documents import attach_all
from image_commands.image import Image
from image_commands.registry import Reference
from image_commands.signing import sign

# Compressed once and pulled often: skopeo's zstd has four levels, and 9 is its third.
LEVEL = 9
_TERMS = "it holds NVIDIA's libraries under NVIDIA's terms: docs/licences.md says who may push it"


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
        if code := copy(image, f"docker://{reference}", *chosen, *options).wait():
            return code
        target = reference.at(file.read_text().strip())
    if not arguments.image_only:
        attach_all(image, target)
    if arguments.key:
        sign(image, target, arguments.key)
    print(target)
    return 0


def holds_nvidia(image: Image) -> bool:
    """Whether the image is for GPUs, by its label."""
    return image.labels.get("cog-triton.sm", "cpu") != "cpu"
