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

import sys
from argparse import ArgumentParser

from image_commands import copying, documents
from image_commands.image import Image
from image_commands.pushing import push
from image_commands.registry import Reference
from image_commands.signing import sign, verify


def main(described: str, arguments: list[str]) -> int:
    """Do what the first word says; returns the exit code."""
    image = Image.read(described)
    match arguments:
        case []:
            return copying.stream(image)
        case ["load"]:
            return copying.load(image)
        case ["push" | "sign" | "verify" as verb, _, *_]:
            return _with_registry(image, verb, arguments[1:])
        case ["sbom"]:
            return documents.print_sbom(image)
        case ["provenance"]:
            return documents.print_provenance(image)
        case ["inspect"]:
            return documents.print_image(image)
        case ["--help" | "-h" | "help"]:
            print(f"{image.reference}\n{__doc__}")
            return 0
    print(f"unknown: {' '.join(arguments)}\n{__doc__}", file=sys.stderr)
    return 64


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
