"""Convert a model (GGUF, or a Hugging Face directory) into this family's checkpoint.

The checkpoint is a directory: model.gguf, config.json, tokenizer.json, tokenizer_config.json
(with the chat template) and generation_config.json.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from cog_triton.build_scripts.openvino import (
    _from_hf,
    _gguf_config,
    _gguf_file,
    _script,
    _tokenizer,
)
from cog_triton.build_scripts.openvino._model import Model
from cog_triton.errors import ModelUnavailable
from cog_triton.text import generation_config
from cog_triton.text.sampling import ABILITIES

DTYPES = {"auto": None, "float16": "F16", "float32": "F32"}


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
    parser.add_argument("--output_dir", type=Path, required=True, help="where to write")
    parser.add_argument(
        "--dtype",
        choices=list(DTYPES),
        default="auto",
        help="type of the matrices written; auto keeps every tensor as it is stored",
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    kind = DTYPES[arguments.dtype]
    path = find_gguf(arguments.model_dir)
    if path is None:
        model = _from_hf.convert(arguments.model_dir, arguments.output_dir, kind)
    else:
        model = convert_gguf(path, arguments.output_dir, kind)
    _script.write_json(arguments.output_dir / "config.json", model.hf_config())
    own = generation_config.load(arguments.model_dir) if arguments.model_dir.is_dir() else {}
    # OpenVINO's library does not load a model whose file has a value of another type.
    sampling = generation_config.sampling_defaults(own, {*ABILITIES})
    path = arguments.output_dir / generation_config.FILE
    _script.write_json(path, {**sampling, **model.special_ids()})
    _script.say(f"{model.architecture}: {len(model.tensors())} tensors -> {arguments.output_dir}")


def find_gguf(source: Path) -> Path | None:
    """The GGUF file that `source` is or holds; None for a Hugging Face directory.

    Raises:
        ModelUnavailable: neither, or more than one GGUF file.
    """
    if source.is_file():
        return source
    if (source / "config.json").is_file():
        return None
    found = sorted(source.glob("*.gguf"))
    if len(found) != 1:
        raise ModelUnavailable(
            f"{source}: wanted a .gguf file, a directory with one .gguf file "
            f"(it has {len(found)}), or a directory with config.json"
        )
    return found[0]


def convert_gguf(path: Path, output: Path, kind: str | None) -> Model:
    """Write model.gguf and the tokenizer files of a GGUF; `kind` None keeps every tensor.

    Raises:
        ModelUnavailable, EngineIncompatible: it cannot be read, or not be honoured.
    """
    source = _gguf_file.Source(path)
    model = _gguf_config.parse(source)
    shapes = source.shapes()
    shapes.pop("rope_freqs.weight", None)
    model.check_tensors(shapes)
    tokenizer = _tokenizer.rebuild(source.fields)
    target = output / "model.gguf"
    target.unlink(missing_ok=True)
    if kind is None:
        _link_or_copy(path.resolve(), target)
    else:
        tensors = [_recoded(source, name, shape, kind) for name, shape in source.shapes().items()]
        _gguf_file.write(target, model.gguf_architecture, source.metadata(), tensors)
    tokenizer.save(str(output / "tokenizer.json"))
    config = _tokenizer.config_of(source.fields, model.max_positions)
    _script.write_json(output / "tokenizer_config.json", config)
    return model


def _recoded(
    source: _gguf_file.Source, name: str, shape: tuple[int, ...], kind: str
) -> _gguf_file.Tensor:
    to = "F32" if len(shape) == 1 else kind
    if source.type_of(name) == to:
        return _gguf_file.Tensor(name, shape, to, lambda: source.raw(name))
    return _gguf_file.Tensor(
        name, shape, to, lambda: _gguf_file.encode(source.floats(name), to, name)
    )


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)


if __name__ == "__main__":
    _script.run(main)
