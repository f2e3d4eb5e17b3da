"""Give a saved OpenVINO model the scaled RoPE frequencies its GGUF asks for."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cog_triton.errors import EngineIncompatible


def replace_frequencies(
    xml: Path, expected: npt.NDArray[np.float64], scaled: npt.NDArray[np.float64]
) -> None:
    """Overwrite the RoPE constant of the model saved at `xml` (weights beside it as .bin).

    Args:
        expected: the inverse frequencies the reader must have written, [head_size / 2].
        scaled: what they are to be, same shape.

    Raises:
        EngineIncompatible: the constant is not there exactly once, so nothing was changed.
    """
    weights = xml.with_suffix(".bin")
    shape = f"1, {expected.size}, 1".replace(" ", "")
    offsets = set()
    with weights.open("rb") as file:
        for layer in ET.parse(xml).getroot().iterfind("./layers/layer[@type='Const']/data"):
            if layer.get("element_type") != "f32" or layer.get("shape", "").replace(" ", "") != shape:
                continue
            file.seek(int(layer.get("offset", "0")))
            found = np.frombuffer(file.read(4 * expected.size), "<f4")
            if np.allclose(found, expected, rtol=1e-4, atol=0.0):
                offsets.add(int(layer.get("offset", "0")))
    if len(offsets) != 1:
        raise EngineIncompatible(
            f"RoPE scaling cannot be carried over: {len(offsets)} constants of the OpenVINO model "
            "look like its frequencies"
        )
    with weights.open("r+b") as file:
        file.seek(offsets.pop())
        file.write(scaled.astype("<f4").tobytes())
