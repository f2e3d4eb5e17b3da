"""Stand-in of nix2container's program: layers and images as JSON, with real digests.

    layers.py layer ATTRS_JSON     writes OUT/layers.json
    layers.py image ATTRS_JSON     writes OUT

Like nix2container, a layer is a list of store paths with options; its tar is made when needed,
the same every time. Refused as there: one name from two paths with different modes or types,
sizes, or permissions.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


def walk(path: str) -> Iterator[str]:
    """`path` and everything below it, sorted."""
    yield path
    if stat.S_ISDIR(os.lstat(path).st_mode):
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            yield from walk(entry.path)


class Node:
    """Name in the tar: its source and permissions."""

    def __init__(self, source: str, perms: list[dict[str, Any]]) -> None:
        self.source = source
        self.perms = perms
        self.info = os.lstat(source)
        size = self.info.st_size if stat.S_ISREG(self.info.st_mode) else None
        self.kind = (stat.filemode(self.info.st_mode), size, perms)


def add(nodes: dict[str, Node | None], name: str, node: Node) -> None:
    """Add a node, or refuse it."""
    there = nodes.get(name)
    if there is not None and there.kind != node.kind:
        raise SystemExit(
            f"the file '{name}' is in the layer with mode, size and permissions {there.kind} from"
            f" '{there.source}', and again with {node.kind} from '{node.source}'"
        )
    parent = name.rpartition("/")[0]
    while parent and parent not in nodes:
        nodes[parent] = None
        parent = parent.rpartition("/")[0]
    nodes[name] = node


def nodes_of(paths: list[dict[str, Any]]) -> dict[str, Node | None]:
    """Nodes of a layer's tar by name; None is a directory without a source."""
    nodes: dict[str, Node | None] = {"/": None} if paths else {}
    for path in paths:
        options = path.get("options") or {}
        rewrite = options.get("rewrite") or {}
        for source in walk(path["path"]):
            name = source
            if rewrite.get("regex"):
                name = re.sub(rewrite["regex"], rewrite["repl"], source)
            if name:
                add(nodes, name, Node(source, options.get("perms") or []))
    return nodes


def entry_of(name: str, node: Node | None) -> tarfile.TarInfo:
    """Tar entry of a name."""
    entry = tarfile.TarInfo(name)
    entry.mtime, entry.uname, entry.gname = 1, "root", "root"
    if node is None:
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
        return entry
    mode = node.info.st_mode
    entry.mode = stat.S_IMODE(mode)
    if stat.S_ISLNK(mode):
        entry.type, entry.mode = tarfile.SYMTYPE, 0o777
        entry.linkname = str(Path(node.source).readlink())
    elif stat.S_ISDIR(mode):
        entry.type = tarfile.DIRTYPE
    else:
        entry.size = node.info.st_size
    for perm in node.perms:
        if re.search(perm["regex"], node.source):
            entry.uid, entry.gid = perm.get("uid", 0), perm.get("gid", 0)
            entry.mode = int(perm["mode"], 8) if perm.get("mode") else entry.mode
    return entry


def write_tar(paths: list[dict[str, Any]], target: Any) -> None:
    """Write the layer's tar, parents before children."""
    nodes = nodes_of(paths)
    with tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(nodes, key=lambda name: name.encode().split(b"/")):
            entry, node = entry_of(name, nodes[name]), nodes[name]
            if node is not None and entry.isreg():
                with Path(node.source).open("rb") as file:
                    archive.addfile(entry, file)
            else:
                archive.addfile(entry)


class Digest(io.RawIOBase):
    """Write-only file that keeps SHA-256 and size of its data."""

    def __init__(self, copy: BinaryIO | None = None) -> None:
        self.sha256, self.size, self._copy = hashlib.sha256(), 0, copy

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        self.size += len(data)
        if self._copy is not None:
            self._copy.write(data)
        return len(data)


def make_layer(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    """Layer of a closure, without paths of lower layers with the same options."""
    below = [
        path
        for file in attributes["parents"]
        for layer in json.loads(Path(file).read_text())
        for path in layer["paths"]
    ]
    rewrites = {item["path"]: item for item in attributes["rewrites"]}
    paths = []
    for store_path in sorted(item["path"] for item in attributes["graph"]):
        options: dict[str, Any] = {}
        perms = [item for item in attributes["perms"] if item["path"] == store_path]
        if perms:
            options["perms"] = [{k: v for k, v in item.items() if k != "path"} for item in perms]
        if store_path in rewrites:
            options["rewrite"] = {key: rewrites[store_path][key] for key in ("regex", "repl")}
        path = {"path": store_path} | ({"options": options} if options else {})
        if store_path != attributes["ignore"] and path not in below:
            paths.append(path)
    if not paths:
        return []
    digest = Digest()
    write_tar(paths, digest)
    name = f"sha256:{digest.sha256.hexdigest()}"
    return [
        {
            "digest": name,
            "diff_ids": name,
            "size": digest.size,
            "paths": paths,
            "mediatype": "application/vnd.oci.image.layer.v1.tar",
            "History": attributes["metadata"],
        }
    ]


def main(verb: str, file: str) -> None:
    """Command line of the derivations."""
    attributes = json.loads(Path(file).read_text())
    out = Path(attributes["outputs"]["out"])
    if verb == "layer":
        out.mkdir()
        (out / "layers.json").write_text(json.dumps(make_layer(attributes), sort_keys=True))
        return
    layers: dict[str, Any] = {}
    for name in attributes["files"]:
        for layer in json.loads(Path(name).read_text()):
            layers.setdefault(layer["digest"], layer)
    image = {
        "version": 1,
        "image-config": attributes["config"],
        "layers": list(layers.values()),
        "arch": attributes["arch"],
        "created": attributes["created"],
    }
    out.write_text(json.dumps(image, sort_keys=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
