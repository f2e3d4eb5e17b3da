"""Selection of the files of a hub repository."""

from __future__ import annotations

import pytest

from cog_triton.download.hub_cache import choose
from cog_triton.errors import ModelUnavailable

SHARDED = [
    ".gitattributes",
    "LICENSE.txt",
    "README.md",
    "config.json",
    "consolidated.safetensors",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "onnx/config.json",
    "optimizer.bin",
    "original/consolidated.00.pth",
    "pytorch_model-00001-of-00001.bin",
    "pytorch_model.bin.index.json",
    "tokenization.py",
    "tokenizer.json",
    "tokenizer.model",
    "training_args.bin",
]
BESIDE = ["LICENSE.txt", "config.json"]
TOKENIZER = ["tokenizer.json", "tokenizer.model"]


def test_weights_are_selected_in_one_format() -> None:
    assert choose(SHARDED, None, None, "x") == [
        *BESIDE,
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        *TOKENIZER,
    ]
    assert choose(SHARDED, None, "bin", "x") == [
        *BESIDE,
        "pytorch_model-00001-of-00001.bin",
        "pytorch_model.bin.index.json",
        *TOKENIZER,
    ]


def test_the_first_available_format_is_the_default() -> None:
    assert choose(["config.json", "a.bin", "a.pt"], None, None, "x") == ["a.bin", "config.json"]
    assert choose(["a.pth", "b.pt"], None, None, "x") == ["a.pth", "b.pt"]
    assert choose(["consolidated.safetensors"], None, None, "x") == ["consolidated.safetensors"]


def test_patterns_override_the_selection() -> None:
    assert choose(SHARDED, ("*.py", "onnx/*"), None, "x") == ["onnx/config.json", "tokenization.py"]


@pytest.mark.parametrize(
    ("names", "files", "weight_format", "says"),
    [
        (SHARDED, ("*.gguf",), None, r"x: no file matches \*\.gguf; there is .* and 5 more"),
        (SHARDED, None, "pt", "no weights as weight_format pt beside"),
        (["config.json", "a/b.bin"], None, None, "no weights as safetensors, bin or pt"),
        ([], None, None, "there is nothing"),
    ],
)
def test_a_selection_of_nothing_is_refused(
    names: list[str], files: tuple[str, ...] | None, weight_format: str | None, says: str
) -> None:
    with pytest.raises(ModelUnavailable, match=says):
        choose(names, files, weight_format, "x")
