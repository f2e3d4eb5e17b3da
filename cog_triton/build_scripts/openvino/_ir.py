"""Float32 RoPE frequencies and epsilons for a saved OpenVINO model, which rounds them.

OpenVINO's GGUF reader drops RoPE scaling, and saves most float32 constants as float16. Rotary
frequencies do not survive that: rounded to 11 bits they are off by whole radians after a few
thousand positions. So the frequencies, scaled where the model asks for it, are put back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino

from cog_triton.errors import EngineIncompatible

Floats = npt.NDArray[np.float64]
_HALF_PRECISION = 2.0**-10


def restore(xml: Path, plain: Floats, scaled: Floats, epsilon: float) -> None:
    """Rewrite the model saved at `xml` (weights beside it as .bin).

    Args:
        plain: the inverse frequencies the reader must have written, [head_size / 2].
        scaled: what they are to be, same shape.
        epsilon: of the RMS norms.

    Raises:
        EngineIncompatible: the frequencies are not there exactly once; nothing was changed.
    """
    model = openvino.Core().read_model(xml)
    found = _constants_like(model, plain.reshape(1, -1, 1))
    if len(found) != 1:
        raise EngineIncompatible(
            f"the OpenVINO model has {len(found)} constants that look like its RoPE frequencies, "
            "not one: they cannot be made exact"
        )
    _replace(found[0], scaled.reshape(1, -1, 1), "rope_frequencies")
    for index, constant in enumerate(_constants_like(model, np.full((1, 1, 1), epsilon))):
        _replace(constant, np.full((1, 1, 1), epsilon), f"rms_norm_eps_{index}")
    fresh = xml.with_name("exact.xml")
    openvino.save_model(model, fresh, compress_to_fp16=False)
    del model, found  # they map the old weights
    fresh.with_suffix(".bin").replace(xml.with_suffix(".bin"))
    fresh.replace(xml)


def _constants_like(model: Any, expected: Floats) -> list[Any]:
    """The model's floating-point constants of that shape and, to half precision, those values."""
    return [
        node
        for node in model.get_ordered_ops()
        if node.get_type_name() == "Constant"
        and str(node.get_element_type().get_type_name()) in ("f16", "f32")
        and list(node.get_output_shape(0)) == list(expected.shape)
        # Half precision has a smallest number, too.
        and np.allclose(node.data, expected, rtol=_HALF_PRECISION, atol=6e-8)
    ]


def _replace(constant: Any, values: Floats, name: str) -> None:
    """Let a float32 constant stand for `constant` and the conversion to float32 behind it."""
    users = list(constant.output(0).get_target_inputs())
    first = users[0].get_node()
    output = first.output(0) if first.get_type_name() == "Convert" else constant.output(0)
    fresh = openvino.opset13.constant(values.astype(np.float32), name=name)
    for user in list(output.get_target_inputs()):
        user.replace_source_output(fresh.output(0))
