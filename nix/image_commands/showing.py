"""Image shown: its configuration, its layers and their sizes."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from subprocess import PIPE, Popen
from typing import IO

from image_commands.contents import layer_tars
from image_commands.image import Image, name_of


def inspect(image: Image) -> int:
    """Print what the image is."""
    layers = [
        {"digest": layer["digest"], "size": layer["size"], **layer["History"]}
        for layer in image.layers
    ]
    shown = {"reference": image.reference, "config": image.about["image-config"], "layers": layers}
    print(json.dumps(shown, indent=2, sort_keys=True))
    return 0


def size(image: Image, *, compressed: bool) -> int:
    """Print one line for each layer, the first at the bottom of the image.

    compressed: print what zstd -9 leaves of each beside its size; reads the whole image.
    """
    columns = {layer["digest"]: [layer["size"]] for layer in image.layers}
    for layer, tar in layer_tars(image) if compressed else ():
        columns[layer["digest"]].append(zstd_size(image, tar))
    for layer in image.layers:
        sizes = "".join(f"{number:>14,}  " for number in columns[layer["digest"]])
        print(f"{sizes}{name_of(layer):<12} {layer['History'].get('comment', '')}")
    totals = [sum(numbers) for numbers in zip(*columns.values(), strict=True)]
    print("".join(f"{total:>14,}  " for total in totals) + f"total, {len(columns)} layers")
    return 0


def zstd_size(image: Image, tar: IO[bytes]) -> int:
    """Compress a layer with zstd, level 9; returns the bytes that are left."""
    command = [image.tools["zstd"], "-q", "-9", "-T0", "--stdout"]
    with Popen(command, stdin=PIPE, stdout=PIPE) as process, ThreadPoolExecutor(1) as pool:
        assert process.stdin is not None
        assert process.stdout is not None
        left = pool.submit(_count, process.stdout)
        shutil.copyfileobj(tar, process.stdin, 1 << 20)
        process.stdin.close()
        size = left.result()
    if process.returncode:
        raise SystemExit(f"zstd failed (code {process.returncode})")
    return size


def _count(stream: IO[bytes]) -> int:
    return sum(map(len, iter(lambda: stream.read(1 << 20), b"")))
