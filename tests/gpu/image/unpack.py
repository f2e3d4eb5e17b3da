"""Unpack a kit while it arrives, and make the image's parts and the peer's of its wheels.

python unpack.py ROOT

Below ROOT: wheels/, made/LAYER (the image's layers), peer/PART (the same wheels, nothing left out).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import installed_files
from parts import Maker
from receive import Kit, Stream

PATIENCE_S = 900


class Unpacking:
    """What has come so far of the kit in ROOT/kit."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.kit = Kit(root / "kit")
        self.held: dict[str, list[dict[str, Any]]] = {}
        self.came: defaultdict[str, list[Path]] = defaultdict(list)
        self.index: dict[str, Any] = {}
        self._maker: Maker | None = None
        wanted = json.loads((root / "kit" / "held.json").read_text("utf-8"))
        sizes = {(row["of"], row.get("of_size", row["size"])) for row in wanted}
        self.there = installed_files.find(sizes)

    @property
    def maker(self) -> Maker:
        """Makes parts; there once the carried layers are."""
        if self._maker is None:
            self._maker = Maker(self.root, self.index)
        return self._maker

    def run(self) -> dict[str, Any]:
        """Read the whole kit, make everything of it; returns what making the parts told."""
        with tarfile.open(fileobj=Stream(self.kit, PATIENCE_S), mode="r|") as archive:
            for item in archive:
                content = archive.extractfile(item)
                assert content
                self._member(item.name, content)
        return self.maker.finish()

    def _member(self, name: str, content: IO[bytes]) -> None:
        kind, _, rest = name.rpartition("/")
        if name == "image.json":
            self.index = json.load(content)
            _write(self.root / name, [json.dumps(self.index).encode()])
        elif kind == "held":
            self.held[rest.removesuffix(".json")] = json.load(content)
        elif kind in ("more", "deltas"):
            path = self.root / name
            _write(path, _blocks(content))
            if rest.endswith(".whl"):  # the installer, zstd, the small model
                zipfile.ZipFile(path).extractall(self.root / "tools")
        elif kind == "layers":
            layer = rest.removesuffix(".tar.zst")
            with (
                _opened(content) as plain,
                tarfile.open(fileobj=plain, mode="r|") as archive,
            ):
                archive.extractall(self.root / "made" / layer, filter=below)
            print(f"{time.strftime('%X')} layer {layer}", flush=True)
        elif kind == "wheels":
            self._wheel(rest.removesuffix(".zst"), content)
        else:
            with _opened(content) as plain:
                _write(self.root / name.removesuffix(".zst"), _blocks(plain))

    def _wheel(self, name: str, content: IO[bytes]) -> None:
        path = self.root / "wheels" / name
        with _opened(content) as plain:
            _write(path, _blocks(plain))
        if held := self.held.get(name):
            with zipfile.ZipFile(path, "a", zipfile.ZIP_STORED) as archive:
                for row in held:
                    item = zipfile.ZipInfo(row["name"])
                    item.external_attr = row["attributes"]
                    archive.writestr(item, self._restored(row))
        (part,) = (part for part, names in self.index["wheels"].items() if name in names)
        self.came[part].append(path)
        if len(self.came[part]) == len(self.index["wheels"][part]):
            print(f"{time.strftime('%X')} all wheels of {part}", flush=True)
            self.maker.start(part, sorted(self.came[part]))

    def _restored(self, row: dict[str, Any]) -> bytes:
        """A file that did not travel, of what this machine has, or of the kit's extra pieces."""
        from backports import zstd

        pieces = sorted((self.kit.directory / "extra").glob(f"{row['sha256']}-*"))
        if pieces:
            return zstd.decompress(b"".join(piece.read_bytes() for piece in pieces))
        theirs = self.there[row["of"]]
        if not row["delta"]:
            return theirs.read_bytes()
        return installed_files.restored(self.root / row["delta"], theirs)


def below(item: tarfile.TarInfo, target: str) -> tarfile.TarInfo:
    """A layer's member below `target`, with all of its mode; raises tarfile.FilterError outside.

    Names in a layer may be absolute.
    """
    relative = item.replace(name=item.name.lstrip("/") or ".", deep=False)
    if item.islnk():
        raise tarfile.AbsoluteLinkError(item)
    checked = tarfile.tar_filter(relative, target)
    return checked.replace(mode=item.mode, deep=False)


def _opened(content: IO[bytes]) -> IO[bytes]:
    """The plain bytes of a compressed file."""
    from backports import zstd

    options = {zstd.DecompressionParameter.window_log_max: 27}
    opened: IO[bytes] = zstd.ZstdFile(content, "rb", options=options)
    return opened


def _blocks(content: IO[bytes]) -> Iterator[bytes]:
    while block := content.read(1 << 20):
        yield block


def _write(path: Path, blocks: Iterator[bytes] | list[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.writelines(blocks)


def main(root: Path) -> None:
    """Unpack, make, merge, compare; what came of it is in ROOT/assembled.json."""
    import assembled

    for name in ("made", "peer", "wheels", "root", "peer-root"):
        if (root / name).exists():
            subprocess.run(["rm", "-rf", root / name], check=True)
    shutil.rmtree(root / "tools", ignore_errors=True)
    sys.path.insert(0, str(root / "tools"))
    began = time.monotonic()
    told = Unpacking(root).run()
    made = assembled.finish(root, told)
    made["seconds"] = round(time.monotonic() - began, 1)
    new = root / "assembled.new"
    new.write_text(json.dumps(made, indent=1), "utf-8")
    new.replace(root / "assembled.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
