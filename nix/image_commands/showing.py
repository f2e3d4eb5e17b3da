"""Image shown: its configuration, its layers and their sizes."""

from __future__ import annotations

import json

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


def size(image: Image) -> int:
    """Print one line for each layer, the first at the bottom of the image."""
    for layer in image.layers:
        comment = layer["History"].get("comment", "")
        print(f"{layer['size']:>14,}  {name_of(layer):<12} {comment}")
    total = sum(layer["size"] for layer in image.layers)
    print(f"{total:>14,}  total, {len(image.layers)} layers")
    return 0
