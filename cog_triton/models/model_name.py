"""Classification of what a user names: an engine, a model of one of four kinds, or a mistake."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cog_triton.errors import EngineCorrupt, ModelUnavailable, nearest
from cog_triton.system.paths import expanded
from cog_triton.system.redaction import redact_address

Kind = Literal["engine", "hub", "directory", "gguf", "package"]

# What is wrong is told before anything that takes its time is imported.

ACCEPTED = (
    "name an engine.tar, its URL, oci://REF, an engine directory, a Hugging Face model (ORG/NAME),"
    " a directory of safetensors, or a .gguf file"
)
_HUB = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(?:@([\w][\w./-]*))?")
_TARS = (".tar", ".tar.gz", ".tgz", ".tar.zst")
_FILES = (*_TARS, ".gguf", ".yaml", ".yml", ".json", ".safetensors")
_BUILD_KEYS = {"model_id", "example_name", "build"}
_SERVE_KEYS = {
    *("preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls"),
    *("vllm_model", "lora_adapters", "instantiate"),
}
# An engine directory of any family has one of these.
_ENGINE_FILES = {
    "cog-triton.json",
    "config.json",
    "model.json",
    "llmapi.yaml",  # refused, by what to use instead
    "openvino_model.xml",
    "mock.json",
}
_GGUF = b"GGUF"
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")  # gzip, zstd
_USTAR, _USTAR_AT, _HEAD = b"ustar", 257, 512
_MAX_CONFIG = 1 << 20
_SHOWN = 8


@dataclass(frozen=True)
class ModelName:
    """What `text` names: an `engine`, or a model; `remark` says what else it might have meant.

    Attributes:
        path: of what is on this machine.
        model_id: of a hub's model, with the `revision` that was asked for.
        family: of an engine directory.
    """

    kind: Kind
    text: str
    path: Path | None = None
    model_id: str | None = None
    revision: str | None = None
    family: str | None = None
    remark: str | None = None


def recognize(text: str) -> ModelName:
    """Tell what `text` names, by the files of this machine alone; what is here goes first.

    Raises:
        ModelUnavailable: it is not there, or is something else; says what, and what to do.
        EngineCorrupt: a directory that is neither an engine nor a model.
    """
    if text.startswith("pypi:"):
        return ModelName("package", text)
    if "://" in text:
        return ModelName("engine", text)
    path = expanded(text)
    hub = _HUB.fullmatch(text)
    try:
        there = path.exists()
    except (OSError, ValueError):  # too long, or with a NUL
        there = False
    if there:
        found = _directory(text, path) if path.is_dir() else _file(text, path)
        if hub is None or hub[2]:
            return found
        remark = f"{text} is here, so it is not the hub's; that one is {text}@main"
        return ModelName(**{**vars(found), "remark": remark})
    if hub is not None and not hub[1].endswith(_FILES):
        return ModelName("hub", text, model_id=hub[1], revision=hub[2])
    raise ModelUnavailable(_absent(text, path))


def _directory(text: str, path: Path) -> ModelName:
    held = sorted(file.name for file in path.iterdir())
    if _ENGINE_FILES & set(held) and (family := _family(path)):
        return ModelName("engine", text, path=path, family=family)
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return ModelName("directory", text, path=path)
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return ModelName("gguf", text, path=found[0])
    shown = ", ".join(held[:_SHOWN]) + (" and more" if len(held) > _SHOWN else "")
    if (path / "config.json").is_file():
        raise ModelUnavailable(
            f"{text!r} has a config.json and no *.safetensors: of weights only those are taken, as"
            f" pickled ones (.bin, .pt) can run code; it holds {shown}"
        )
    raise EngineCorrupt(
        f"{text!r} is a directory with neither an engine nor a model"
        f"{f' ({len(found)} .gguf files: name one)' if found else ''}; it holds"
        f" {shown or 'nothing'}; {ACCEPTED}"
    )


def _family(path: Path) -> str | None:
    from cog_triton.engines.registry import FAMILIES

    return next((family.name for family in FAMILIES if family.matches(path)), None)


def _file(text: str, path: Path) -> ModelName:
    try:
        with path.open("rb") as file:
            start = file.read(_HEAD)
    except OSError as error:
        raise ModelUnavailable(f"{text!r} cannot be read: {error.strerror}") from None
    if start.startswith(_GGUF):
        return ModelName("gguf", text, path=path)
    if path.suffix in (".yaml", ".yml"):
        raise ModelUnavailable(f"{text!r} is {_config(text, path)}")
    if path.suffix == ".safetensors":
        raise ModelUnavailable(
            f"{text!r} is a file of weights: name its directory, which has config.json and"
            " tokenizer.json"
        )
    if path.name.endswith(_TARS):
        return ModelName("engine", text, path=path)
    if start.startswith(_COMPRESSED) or start[_USTAR_AT:].startswith(_USTAR):
        return ModelName("engine", text, path=path)
    raise ModelUnavailable(f"{text!r} is a file, but neither a tar nor a GGUF; {ACCEPTED}")


def _config(text: str, path: Path) -> str:
    """What a YAML file is, and what to do with it."""
    import yaml

    try:
        value = yaml.safe_load(path.read_bytes()[:_MAX_CONFIG])
    except (OSError, ValueError, yaml.YAMLError):
        value = None
    keys = set(value) if isinstance(value, dict) else set()
    if keys & _BUILD_KEYS:
        return (
            f"a build config: run cog-triton build {text} -o engine.tar, then"
            " cog-triton serve engine.tar"
        )
    if keys & _SERVE_KEYS:
        return f"a serve config: run cog-triton serve --config {text} ENGINE"
    return f"a YAML file, and neither a build config nor a serve config; {ACCEPTED}"


def _absent(text: str, path: Path) -> str:
    shown = redact_address(text)
    try:
        names = [other.name for other in path.absolute().parent.iterdir()]
    except OSError:
        names = []
    close = nearest(path.name, names)
    # The hub's oldest models were called by one word.
    word = re.fullmatch(r"[A-Za-z0-9][\w.-]*", text) and not text.endswith(_FILES)
    org = "; a Hugging Face model is ORG/NAME" if word and not close else ""
    return f"{shown!r}: no such file or directory{close}{org}; {ACCEPTED}"
