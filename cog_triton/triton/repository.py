"""Renders ``triton_model_repo/`` for one engine into a run directory, through protobuf."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from cog_triton.engines.base import EngineFamily
from cog_triton.errors import InvalidPredictorConfig, nearest
from cog_triton.paths import data_dir
from cog_triton.triton.serve_config import MODELS, ServeConfig

ENGINE_MODEL = "tensorrt_llm"
_INSTANCE_COUNTS: Mapping[str, str] = {
    "preprocessing": "preprocessing_instance_count",
    "postprocessing": "postprocessing_instance_count",
    "tensorrt_llm_bls": "bls_instance_count",
}


def render(family: EngineFamily, serve_config: ServeConfig, target: Path) -> Path:
    """Write every model's ``config.pbtxt`` and ``1/`` under `target`; returns `target`.

    Raises E1202 naming an argument that its model does not have.
    """
    source = data_dir("triton_model_repo")
    shutil.rmtree(target, ignore_errors=True)
    engine_config: Any = None
    for model in (ENGINE_MODEL, *(name for name in MODELS if name != ENGINE_MODEL)):
        config = read_config(source / model / "config.pbtxt")
        version = target / model / "1"
        version.mkdir(parents=True)
        if model == ENGINE_MODEL:
            engine_config = config
            model_py = family.render(config, serve_config.of(model))
            if model_py is not None:
                (version / "model.py").write_text(model_py, "utf-8")
        else:
            config.max_batch_size = engine_config.max_batch_size
            if "tokenizer_dir" in config.parameters:
                config.parameters["tokenizer_dir"].string_value = str(family.directory)
            for name, value in serve_config.of(model).items():
                _apply(config, name, value)
            code = source / model / "1" / "model.py"
            if code.is_file():
                shutil.copy(code, version)
        (target / model / "config.pbtxt").write_text(text_format.MessageToString(config), "utf-8")
    return target


def read_config(path: Path) -> Any:
    """Parse one ``config.pbtxt`` into tritonclient's ModelConfig."""
    return text_format.Parse(path.read_text("utf-8"), model_config_pb2.ModelConfig())


def _apply(config: Any, name: str, value: Any) -> None:
    """Set the argument `name`, in the seed's vocabulary, on a text model's config."""
    count_name = _INSTANCE_COUNTS.get(config.name)
    if name == "triton_max_batch_size":
        config.max_batch_size = _count(config, name, value)
    elif name == count_name:
        if config.name == "postprocessing" and value != 1:
            raise InvalidPredictorConfig(
                f"postprocessing.args.{name}={value!r}: must be 1; with more, Triton reorders"
                " the tokens of a stream"
            )
        config.instance_group[0].count = _count(config, name, value)
    elif name in config.parameters:
        if not isinstance(value, str | int | float):
            raise InvalidPredictorConfig(
                f"{config.name}.args.{name}={value!r}: must be text, a number, true or false"
            )
        config.parameters[name].string_value = str(value)
    else:
        known = sorted(filter(None, ["triton_max_batch_size", count_name, *config.parameters]))
        raise InvalidPredictorConfig(
            f"{config.name}.args.{name}={value!r}: unknown argument{nearest(name, known)};"
            f" known: {', '.join(known)}"
        )


def _count(config: Any, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidPredictorConfig(f"{config.name}.args.{name}={value!r}: must be 1 or more")
    return value
