"""Provenance of an image: an in-toto statement with a SLSA provenance predicate, version 1.

It says what was built from what. It claims no SLSA level: the one who built it wrote it, too.
"""

from __future__ import annotations

import re
from typing import Any

from image_commands.image import Image

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
_URN = "urn:cog-triton"
_COMMIT = re.compile(r"[0-9a-f]{40}")


def statement(image: Image, name: str, digest: str) -> dict[str, Any]:
    """Return the statement about what `name` and `digest` (``sha256:...``) say."""
    algorithm, _, value = digest.partition(":")
    return {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {algorithm: value}}],
        "predicateType": PREDICATE,
        "predicate": predicate(image),
    }


def predicate(image: Image) -> dict[str, Any]:
    """Return the predicate, the same for every copy of the image."""
    source = image.source
    files = [
        {"name": path, "digest": {"sha256": digest}}
        for path, digest in sorted(source["materials"].items())
    ]
    page = f"{image.home}/blob/main/docs/supply-chain.md" if image.home else f"{_URN}:supply-chain"
    inputs = [_locked(name, locked) for name, locked in sorted(source["inputs"].items())]
    return {
        "buildDefinition": {
            "buildType": f"{page}#build-type",
            "externalParameters": {
                "flake": _uri(image),
                "revision": source["revision"],
                "image": image.reference.partition(":")[0],
                "system": "x86_64-linux",
            },
            "resolvedDependencies": [_flake(image), *files, *inputs],
        },
        "runDetails": {"builder": {"id": f"{page}#built-locally"}},
    }


def _uri(image: Image) -> str:
    """URI of the repository: of its public home, else a name for the one that was built from."""
    return f"git+{image.home}" if image.home else _URN


def _flake(image: Image) -> dict[str, Any]:
    """Descriptor of the source; a tree with changes has no digest that names it."""
    revision = image.source["revision"]
    described = {"name": "source", "uri": _uri(image)}
    if _COMMIT.fullmatch(revision):
        return {**described, "digest": {"gitCommit": revision}}
    return {**described, "annotations": {"revision": revision, "uncommittedChanges": True}}


def _locked(name: str, locked: dict[str, Any]) -> dict[str, Any]:
    uri = f"git+https://github.com/{locked['owner']}/{locked['repo']}"
    digest = {"gitCommit": locked["rev"]}
    return {
        "name": name,
        "uri": uri,
        "digest": digest,
        "annotations": {"narHash": locked["narHash"]},
    }
