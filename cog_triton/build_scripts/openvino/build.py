"""Build an OpenVINO engine directory from a (quantized) checkpoint."""

# OpenVINO's GGUF reader drops RoPE scaling, and saves most float32 constants as float16. Rotary
# frequencies do not survive that: rounded to 11 bits they are off by whole radians after a few
# thousand positions. So the frequencies, scaled where the model asks for it, are put back.

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino
import openvino_genai

from cog_triton import __version__
from cog_triton.build_scripts.openvino import _gguf_file, _model, _script
from cog_triton.errors import EngineIncompatible, InvalidArgument, ModelUnavailable

# Keys of the model's config.json that TensorRT-LLM's engine config spells the same.
_SAME = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
_IDS = ("eos_token_id", "bos_token_id", "pad_token_id")
_HALF_PRECISION = 2.0**-10
_READABLE = ("F16", "Q8_0", "Q4_0")
Floats = npt.NDArray[np.float64]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--checkpoint_dir", type=Path, required=True, help="a checkpoint of quantize.py"
    )
    parser.add_argument("--output_dir", type=Path, required=True, help="engine directory to write")
    parser.add_argument(
        "--max_batch_size", type=int, default=16, help="requests in flight at once (default 16)"
    )
    parser.add_argument(
        "--max_seq_len", type=int, help="prompt and output, tokens (default: the model's own limit)"
    )
    parser.add_argument(
        "--max_input_len", type=int, help="prompt, tokens (default: max_seq_len - 1)"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    path = arguments.checkpoint_dir / "model.gguf"
    if not path.is_file():
        raise ModelUnavailable(f"{path}: missing; --checkpoint_dir wants quantize.py's output")
    config = _script.read_json(arguments.checkpoint_dir / "config.json")
    limits = _limits(arguments, config["max_position_embeddings"])
    source = _gguf_file.Source(path)
    _check_types(source)
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    _script.say(f"build: reading {path.name} into an OpenVINO model")
    with tempfile.TemporaryDirectory(dir=arguments.output_dir, prefix=".building-") as temporary:
        directory = Path(temporary)
        (directory / "model.gguf").symlink_to(path.resolve())
        # The reader saves the model beside the GGUF as it loads it.
        openvino_genai.LLMPipeline(str(directory / "model.gguf"), "CPU", enable_save_ov_model=True)
        (directory / "model.gguf").unlink()
        _restore_exactness(directory / "openvino_model.xml", source, config)
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copyfile(arguments.checkpoint_dir / name, directory / name)
        _script.write_json(directory / "config.json", _engine_config(config, source, limits))
        for made in sorted(directory.iterdir()):
            made.replace(arguments.output_dir / made.name)
    size = (arguments.output_dir / "openvino_model.bin").stat().st_size
    _script.say(f"build: {arguments.output_dir} ({size / 2**20:.0f} MiB of weights)")


def _limits(arguments: argparse.Namespace, model_limit: int) -> dict[str, int]:
    seq = model_limit if arguments.max_seq_len is None else arguments.max_seq_len
    prompt = seq - 1 if arguments.max_input_len is None else arguments.max_input_len
    rules = {
        "max_batch_size": (arguments.max_batch_size, 1, 1024),
        "max_seq_len": (seq, 2, model_limit),
        "max_input_len": (prompt, 1, seq - 1),
    }
    for name, (value, low, high) in rules.items():
        if not low <= value <= high:
            raise InvalidArgument(f"--{name} {value} must be from {low} to {high}")
    return {
        "max_input_len": prompt,
        "max_seq_len": seq,
        "max_batch_size": arguments.max_batch_size,
        "max_beam_width": 1,
    }


def _check_types(source: _gguf_file.Source) -> None:
    """Refuse tensor types that OpenVINO's reader would refuse late, or misread."""
    for name, shape in source.shapes().items():
        kind = source.type_of(name)
        good = kind == "F32" if len(shape) == 1 else kind in _READABLE
        if not good:
            raise EngineIncompatible(
                f"tensor {name} ({kind}) cannot be built as it is: put a quantize step before build"
            )


def _restore_exactness(xml: Path, source: _gguf_file.Source, config: dict[str, Any]) -> None:
    """Restore what the reader drops or rounds: RoPE scaling and frequencies, epsilons."""
    plain = _model.frequencies(config["rope_theta"], config["head_dim"])
    if "rope_freqs.weight" in source.tensors:
        divisors: Any = source.floats("rope_freqs.weight")
    else:
        rope = _model.Rope(config["rope_theta"], config["rope_scaling"])
        divisors = _model.divisors(rope, config["head_dim"])
    scaled = plain if divisors is None else plain / divisors
    _restore(xml, plain, scaled, config["rms_norm_eps"])


def _restore(xml: Path, plain: Floats, scaled: Floats, epsilon: float) -> None:
    """Put float32 frequencies and epsilons back into the model at `xml`, its weights beside it.

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


def _engine_config(
    config: dict[str, Any], source: _gguf_file.Source, limits: dict[str, int]
) -> dict[str, Any]:
    """config.json of the engine, shaped like TensorRT-LLM's."""
    kind = _gguf_file.dominant_type((source.type_of(n), s) for n, s in source.shapes().items())
    return {
        "version": __version__,
        "engine": "openvino",
        "pretrained_config": {
            "architecture": config["architectures"][0],
            "dtype": config["dtype"],
            **{key: config[key] for key in _SAME},
            "head_size": config["head_dim"],
            "norm_epsilon": config["rms_norm_eps"],
            "rotary_base": config["rope_theta"],
            "rotary_scaling": config["rope_scaling"],
            "quantization": {
                "quant_algo": None if kind == "F16" else kind,
                "kv_cache_quant_algo": None,
            },
            **{key: config[key] for key in _IDS},
        },
        "build_config": limits,
    }


if __name__ == "__main__":
    _script.run(main)
