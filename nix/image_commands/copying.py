"""Image copied by skopeo: as an archive to standard output, or into docker."""

from __future__ import annotations

import os
import subprocess
import sys

from image_commands.image import Image


def copy(
    image: Image, target: str, *options: str, stdout: int | None = None
) -> subprocess.Popen[bytes]:
    """Start copying the image; --quiet, because progress would go into the archive."""
    source = f"nix:{image.image}"
    command = [
        image.tools["skopeo"],
        "--insecure-policy",
        "copy",
        "--quiet",
        *options,
        source,
        target,
    ]
    return subprocess.Popen(command, stdout=stdout)


def archive(image: Image, stdout: int | None = None) -> subprocess.Popen[bytes]:
    """Start writing the image as a docker archive, to standard output or a pipe."""
    return copy(image, f"docker-archive:/dev/stdout:{image.reference}", stdout=stdout)


def stream(image: Image) -> int:
    """Write the image to standard output."""
    if sys.stdout.isatty():
        print("An image is no text; try: ./result load", file=sys.stderr)
        return 64
    return archive(image).wait()


def load(image: Image) -> int:
    """Load the image; the loader prints its name."""
    command = [os.environ.get("DOCKER", "docker"), "load"]
    with archive(image, stdout=subprocess.PIPE) as source:
        loader = subprocess.run(command, stdin=source.stdout)
    return source.returncode or loader.returncode
