"""Image shown: its configuration and its layers."""

from __future__ import annotations

import json

from image_commands.image import Image


def inspect(image: Image) -> int:
    """Print what the image is."""
    layers = [
        {"digest": layer["digest"], "size": layer["size"], **layer["History"]}
        for layer in image.layers
    ]
    shown = {"reference": image.reference, "config": image.about["image-config"], "layers": layers}
    print(json.dumps(shown, indent=2, sort_keys=True))
    return 0
