"""The image this file was built as.

./result load               load it into docker (DOCKER=podman: into podman)
./result | docker load      the same
./result push REF [OPTION]  copy it to a registry: docker.io/me/cog-triton:tag; layers that
                            are there are not sent; OPTIONs are skopeo copy's
./result inspect            its name, configuration and layers, as JSON
./result size               its layers with their sizes in bytes and what is in them
"""

import json
import os
import subprocess
import sys
from pathlib import Path

# Filled in by image-commands.nix.
IMAGE = Path("@image@")
REFERENCE = "@reference@"
SKOPEO = "@skopeo@"


def copy(target: str, *options: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
    """Start copying the image; --quiet, because progress would go into the archive."""
    command = [SKOPEO, "--insecure-policy", "copy", "--quiet", *options, f"nix:{IMAGE}", target]
    return subprocess.Popen(command, stdout=stdout)


def stream() -> int:
    """Write the image to standard output."""
    if sys.stdout.isatty():
        print("An image is no text; try: ./result load", file=sys.stderr)
        return 64
    return copy(f"docker-archive:/dev/stdout:{REFERENCE}").wait()


def load() -> int:
    """Load the image; the loader prints its name."""
    command = [os.environ.get("DOCKER", "docker"), "load"]
    with copy(f"docker-archive:/dev/stdout:{REFERENCE}", stdout=subprocess.PIPE) as source:
        loader = subprocess.run(command, stdin=source.stdout)
    return source.returncode or loader.returncode


def inspect() -> int:
    """Print what the image is."""
    image = json.loads(IMAGE.read_text())
    layers = [
        {"digest": layer["digest"], "size": layer["size"], **layer["History"]}
        for layer in image["layers"]
    ]
    shown = {"reference": REFERENCE, "config": image["image-config"], "layers": layers}
    print(json.dumps(shown, indent=2, sort_keys=True))
    return 0


def size() -> int:
    """Print one line for each layer, the first at the bottom of the image."""
    layers = json.loads(IMAGE.read_text())["layers"]
    for layer in layers:
        history = layer["History"]
        name = history.get("created_by", "").removeprefix("cog-triton: ")
        print(f"{layer['size']:>14,}  {name:<12} {history.get('comment', '')}")
    print(f"{sum(layer['size'] for layer in layers):>14,}  total, {len(layers)} layers")
    return 0


def main(arguments: list[str]) -> int:
    """Do what the first word says."""
    match arguments:
        case []:
            return stream()
        case ["load"]:
            return load()
        case ["push", reference, *options]:
            return copy(f"docker://{reference}", *options).wait()
        case ["inspect"]:
            return inspect()
        case ["size"]:
            return size()
        case ["--help" | "-h" | "help"]:
            print(f"{REFERENCE}\n{__doc__}")
            return 0
    print(f"unknown: {' '.join(arguments)}\n{__doc__}", file=sys.stderr)
    return 64


sys.exit(main(sys.argv[1:]))
