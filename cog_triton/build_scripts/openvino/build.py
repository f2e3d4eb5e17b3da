"""Build an OpenVINO engine directory from a model: GGUF, or a Hugging Face directory."""

# OpenVINO's GGUF reader drops RoPE scaling, and saves most float32 constants as float16. Rotary
# frequencies do not survive that: rounded to 11 bits they are off by whole radians after a few
# thousand positions. So the frequencies, scaled where the model asks for it, are put back.

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino
import openvino_genai

from cog_triton import __version__
from cog_triton.build_scripts.openvino import _from_gguf, _from_hf, _gguf_file, _model, _script
from cog_triton.build_scripts.openvino._gguf_file import Tensor
from cog_triton.build_scripts.openvino._model import Checkpoint, Model
from cog_triton.errors import EngineIncompatible, InvalidArgument
from cog_triton.text import generation_config
from cog_triton.text.sampling import ABILITIES

_TYPES = {"q8_0": "Q8_0", "q4_0": "Q4_0", "f16": "F16", "stored": None}
_IDS = ("eos_token_id", "bos_token_id", "pad_token_id")
_OUTER = ("token_embd.weight", "output.weight")
_HALF_PRECISION = 2.0**-10
Floats = npt.NDArray[np.float64]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--model_dir",
        type=Path,
        required=True,
        help="a .gguf file, a directory with one, or a Hugging Face directory "
        "(config.json, *.safetensors, tokenizer.json)",
    )
    parser.add_argument("--output_dir", type=Path, required=True, help="engine directory to write")
    parser.add_argument(
        "--weights",
        choices=list(_TYPES),
        default="q8_0",
        help="matrices as blocks of 32 with one float16 scale: q8_0 8 bits; q4_0 4 bits, but for "
        "embeddings and lm_head, which have 8; f16 does not quantize; stored keeps every type",
    )
    parser.add_argument("--max_batch_size", type=int, default=16, help="requests in flight at once")
    parser.add_argument(
        "--max_seq_len", type=int, help="prompt and output, tokens; the model's own limit if absent"
    )
    parser.add_argument("--max_input_len", type=int, help="prompt, tokens; max_seq_len - 1")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    source = _from_gguf.find(arguments.model_dir)
    checkpoint = _from_hf.read(arguments.model_dir) if source is None else _from_gguf.read(source)
    model = checkpoint.model
    limits = _limits(arguments, model.max_positions)
    tensors = [(each, _type_of(each, _TYPES[arguments.weights])) for each in checkpoint.tensors]
    _script.say(f"build: {model.architecture}, {len(tensors)} tensors, into an OpenVINO model")
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.output_dir, prefix=".building-") as temporary:
        directory = Path(temporary)
        path = directory / "model.gguf"
        if source is not None and all(each.type == to for each, to in tensors):
            path.symlink_to(source.resolve())
        else:
            _gguf_file.write(path, model.gguf_architecture, checkpoint.fields, tensors)
        # The reader saves the model beside the GGUF as it loads it.
        openvino_genai.LLMPipeline(str(path), "CPU", enable_save_ov_model=True)
        path.unlink()
        _restore_exactness(directory / "openvino_model.xml", checkpoint)
        (directory / "tokenizer.json").write_text(checkpoint.tokenizer, "utf-8", newline="")
        _script.write_json(directory / "tokenizer_config.json", checkpoint.tokenizer_config)
        own = generation_config.load(arguments.model_dir) if arguments.model_dir.is_dir() else {}
        # OpenVINO's library does not load a model whose file has a value of another type.
        sampling = generation_config.sampling_defaults(own, {*ABILITIES})
        _script.write_json(directory / generation_config.FILE, {**sampling, **model.special_ids()})
        config = _engine_config(model, _gguf_file.dominant_type(tensors), limits)
        _script.write_json(directory / "config.json", config)
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
    found = {name: rules[name][0] for name in ("max_input_len", "max_seq_len", "max_batch_size")}
    return {**found, "max_beam_width": 1}


def _type_of(tensor: Tensor, wanted: str | None) -> str:
    """The type that a tensor is to have, of those that OpenVINO's reader reads rightly."""
    if len(tensor.shape) == 1:
        return "F32"
    if wanted is None and tensor.type not in _TYPES.values():
        raise EngineIncompatible(
            f"tensor {tensor.name} ({tensor.type}) cannot be built as it is: take --weights q8_0"
        )
    if tensor.shape[-1] % 32:
        return "F16"  # rows that do not divide into blocks
    outer = tensor.name in _OUTER and wanted not in (None, "F16")
    return "Q8_0" if outer else wanted or tensor.type


def _restore_exactness(xml: Path, checkpoint: Checkpoint) -> None:
    """Restore what the reader drops or rounds: RoPE scaling and frequencies, epsilons.

    Raises:
        EngineIncompatible: the frequencies are not there exactly once; nothing was changed.
    """
    epsilon = checkpoint.model.norm_epsilon
    plain = _model.frequencies(checkpoint.model.rope.theta, checkpoint.model.head_size)
    scaled = plain if checkpoint.divisors is None else plain / checkpoint.divisors
    model = openvino.Core().read_model(xml)
    found = _constants_like(model, plain.reshape(1, -1, 1))
    if len(found) != 1:
        raise EngineIncompatible(
            f"the OpenVINO model has {len(found)} constants like its RoPE frequencies, not one"
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


def _engine_config(model: Model, kind: str, limits: dict[str, int]) -> dict[str, Any]:
    """config.json of the engine, shaped like TensorRT-LLM's."""
    algorithm = None if kind == "F16" else kind
    return {
        "version": __version__,
        "engine": "openvino",
        "pretrained_config": {
            "architecture": model.architecture,
            "dtype": model.dtype,
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.num_kv_heads,
            "max_position_embeddings": model.max_positions,
            "head_size": model.head_size,
            "norm_epsilon": model.norm_epsilon,
            "rotary_base": model.rope.theta,
            "rotary_scaling": model.rope.scaling,
            "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": None},
            **{key: model.special_ids()[key] for key in _IDS},
        },
        "build_config": limits,
    }


if __name__ == "__main__":
    _script.run(main)
