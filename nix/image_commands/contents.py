"""Files of an image's layers, read from the archive that docker would be given."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from typing import IO, Any

from image_commands.copying import archive
from image_commands.image import Image, name_of

_CHUNK = 1 << 20
_LAYER = re.compile(r"([0-9a-f]{64})\.tar")
_TYPES = {tarfile.DIRTYPE: "directory", tarfile.SYMTYPE: "link", tarfile.REGTYPE: "file"}


def layer_tars(image: Image) -> Iterator[tuple[dict[str, Any], IO[bytes]]]:
    """Yield every layer of image.json with its uncompressed tar, which is read before the next.

    Raises SystemExit when the archive breaks off or a layer is not in it.
    """
    missing = {layer["digest"].removeprefix("sha256:"): layer for layer in image.layers}
    with archive(image, stdout=subprocess.PIPE) as source:
        try:
            with tarfile.open(fileobj=source.stdout, mode="r|") as members:
                for member in members:
                    found = _LAYER.fullmatch(member.name)
                    if found and member.isfile() and (layer := missing.pop(found[1], None)):
                        content = members.extractfile(member)
                        assert content is not None
                        yield layer, content
        finally:
            source.stdout.close()  # type: ignore[union-attr]
    if source.returncode or missing:
        raise SystemExit(f"skopeo gave no whole archive (code {source.returncode})")


def files_of(tar: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Yield what is in a layer: path, type, mode and, by type, size with SHA-256, or target."""
    with tarfile.open(fileobj=tar, mode="r|") as members:
        for member in members:
            entry = {
                "path": "/" + member.name.strip("/"),
                "type": _TYPES[member.type],
                "mode": f"{member.mode:04o}",
                "size": member.size,
                "sha256": None,
                "link": member.linkname or None,
            }
            if content := members.extractfile(member) if member.isfile() else None:
                digest = hashlib.sha256()
                while data := content.read(_CHUNK):
                    digest.update(data)
                entry["sha256"] = digest.hexdigest()
            yield entry


def files(image: Image) -> int:
    """Print a line of JSON for every file, link and directory of every layer, in order."""
    for layer, tar in layer_tars(image):
        for entry in files_of(tar):
            sys.stdout.write(json.dumps({"layer": name_of(layer), **entry}) + "\n")
    return 0
