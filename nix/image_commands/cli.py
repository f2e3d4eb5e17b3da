"""The image this file was built as.

./result load               load it into docker (DOCKER=podman: into podman)
./result | docker load      the same
./result push REF [OPTION]  copy it to a registry: docker.io/me/cog-triton:tag; layers that
                            are there are not sent; OPTIONs are skopeo copy's
./result inspect            its name, configuration and layers, as JSON
./result size               its layers with their sizes in bytes and what is in them
./result files              every file of every layer, one line of JSON each:
                            layer, path, type, mode, size, sha256, link
"""

from __future__ import annotations

import sys

from image_commands import contents, copying, showing
from image_commands.image import Image


def main(described: str, arguments: list[str]) -> int:
    """Do what the first word says; returns the exit code."""
    image = Image.read(described)
    match arguments:
        case []:
            return copying.stream(image)
        case ["load"]:
            return copying.load(image)
        case ["push", reference, *options]:
            return copying.push(image, reference, options)
        case ["inspect"]:
            return showing.inspect(image)
        case ["size"]:
            return showing.size(image)
        case ["files"]:
            return contents.files(image)
        case ["--help" | "-h" | "help"]:
            print(f"{image.reference}\n{__doc__}")
            return 0
    print(f"unknown: {' '.join(arguments)}\n{__doc__}", file=sys.stderr)
    return 64
