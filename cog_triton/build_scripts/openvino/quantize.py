"""Quantize a checkpoint's matrices; embeddings and lm_head stay at 8 bits."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from cog_triton.build_scripts.openvino import _gguf_file, _script
from cog_triton.errors import ModelUnavailable

SIDE_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
FORMATS = {"q8_0": "Q8_0", "q4_0": "Q4_0", "f16": "F16"}
_OUTER = ("token_embd.weight", "output.weight")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--model_dir", type=Path, required=True, help="a checkpoint of convert_checkpoint.py"
    )
    parser.add_argument("--output_dir", type=Path, required=True, help="where to write")
    parser.add_argument(
        "--qformat",
        choices=list(FORMATS),
        default="q8_0",
        help="weights as blocks of 32 with one float16 scale: q8_0 8 bits; q4_0 4 bits; "
        "f16 does not quantize",
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    path = arguments.model_dir / "model.gguf"
    if not path.is_file():
        raise ModelUnavailable(f"{path}: missing; --model_dir wants convert_checkpoint.py's output")
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    source = _gguf_file.Source(path)
    kind = FORMATS[arguments.qformat]
    tensors = [_tensor(source, name, shape, kind) for name, shape in source.shapes().items()]
    target = arguments.output_dir / "model.gguf"
    architecture = str(source.fields["general.architecture"])
    _gguf_file.write(target, architecture, source.metadata(), tensors)
    for name in SIDE_FILES:
        shutil.copyfile(arguments.model_dir / name, arguments.output_dir / name)
    before, after = path.stat().st_size, target.stat().st_size
    _script.say(f"{arguments.qformat}: {before / 2**20:.0f} MiB -> {after / 2**20:.0f} MiB")


def _tensor(
    source: _gguf_file.Source, name: str, shape: tuple[int, ...], kind: str
) -> _gguf_file.Tensor:
    to = kind if name not in _OUTER or kind == "F16" else "Q8_0"
    if len(shape) == 1:
        to = "F32"
    elif shape[-1] % 32:
        to = "F16"  # rows that do not divide into blocks
    if source.type_of(name) == to:
        return _gguf_file.Tensor(name, shape, to, lambda: source.raw(name))
    return _gguf_file.Tensor(
        name, shape, to, lambda: _gguf_file.encode(source.floats(name), to, name)
    )


if __name__ == "__main__":
    _script.run(main)
