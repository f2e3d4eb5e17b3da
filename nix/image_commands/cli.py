"""The image this file was built as.

./result load               load it into docker (DOCKER=podman: into podman)
./result | docker load      the same
./result push REF [--compression zstd|zstd:chunked|gzip] [--key FILE] [--image-only] [OPTION]
                            copy it to a registry: docker.io/me/cog-triton:tag; layers that
                            are there are not sent; attach SBOM and provenance, sign with a
                            key; OPTIONs are skopeo copy's; prints the digest
./result sign --key FILE REF
                            sign what was pushed, its SBOM and its provenance: a key of
                            cosign's (COSIGN_PASSWORD) or a PEM file
./result verify --key FILE REF
                            check all three against a public key; fails else
./result sbom               its layers, store paths, wheels and licences, as SPDX 2.3
./result provenance         what it was built from, as an in-toto statement of SLSA v1
./result inspect            its name, configuration and layers, as JSON

--dest-tls-verify=false (push) or --tls-verify=false (sign, verify): a registry over HTTP.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from typing import Any

from image_commands import documents
from image_commands.image import Image
from image_commands.registry import Reference, push, sign, verify


def main(described: str, arguments: list[str]) -> int:
    """Do what the first word says; returns the exit code."""
    image = Image.read(described)
    match arguments:
        case []:
            return _stream(image)
        case ["load"]:
            return _load(image)
        case ["push" | "sign" | "verify" as verb, _, *_]:
            return _with_registry(image, verb, arguments[1:])
        case ["sbom"]:
            return _print(documents.sbom(image))
        case ["provenance"]:
            # About the image's ID, which docker shows; the digest is a push's.
            shown = image.skopeo(
                "inspect", "--config", "--raw", f"nix:{image.image}", stdout=subprocess.PIPE
            )
            identity = f"sha256:{hashlib.sha256(shown.communicate()[0]).hexdigest()}"
            if shown.returncode:
                return shown.returncode
            return _print(documents.provenance(image, image.reference, identity))
        case ["inspect"]:
            layers = [
                {"digest": layer["digest"], "size": layer["size"], **layer["History"]}
                for layer in image.about["layers"]
            ]
            about = {"config": image.about["image-config"], "layers": layers}
            return _print({"reference": image.reference, **about}, sort_keys=True)
        case ["--help" | "-h" | "help"]:
            print(f"{image.reference}\n{__doc__}")
            return 0
    print(f"unknown: {' '.join(arguments)}\n{__doc__}", file=sys.stderr)
    return 64


def _stream(image: Image) -> int:
    if sys.stdout.isatty():
        print("An image is no text; try: ./result load", file=sys.stderr)
        return 64
    return image.archive().wait()


def _load(image: Image) -> int:
    """Load the image; the loader prints its name."""
    command = [os.environ.get("DOCKER", "docker"), "load"]
    with image.archive(stdout=subprocess.PIPE) as source:
        loader = subprocess.run(command, stdin=source.stdout)
    return source.returncode or loader.returncode


def _with_registry(image: Image, verb: str, arguments: list[str]) -> int:
    parser = ArgumentParser(prog=f"./result {verb}", allow_abbrev=False)
    parser.add_argument("reference", metavar="REF")
    parser.add_argument("--key", metavar="FILE", required=verb != "push")
    if verb == "push":
        choices = ("zstd", "zstd:chunked", "gzip")
        parser.add_argument("--compression", choices=choices)
        parser.add_argument("--image-only", action="store_true", help="attach no documents")
        return push(image, *parser.parse_known_args(arguments))
    parser.add_argument("--tls-verify", choices=["true", "false"], default="true")
    given = parser.parse_args(arguments)
    reference = Reference.parse(given.reference, [f"--tls-verify={given.tls_verify}"])
    return {"sign": sign, "verify": verify}[verb](image, reference, given.key)


def _print(document: dict[str, Any], *, sort_keys: bool = False) -> int:
    print(json.dumps(document, indent=2, sort_keys=sort_keys))
    return 0
