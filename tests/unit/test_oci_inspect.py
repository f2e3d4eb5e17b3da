"""`cog-triton inspect oci://REF`: what it tells of an engine whose weights stay in the registry."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest
from command_line import ran
from local_registry import Registry
from registry_double import RegistryDouble
from sample_engines import with_manifest

from cog_triton.artifact import engine_manifest
from cog_triton.oci import image_manifest, layer_blobs
from cog_triton.oci.engine_push import push
from cog_triton.oci.reference import Reference
from cog_triton.sources import source

COG = ("llm", "/src/weights")
TITLE = "org.opencontainers.image.title"


pytestmark = pytest.mark.usefixtures("home")


def send(address: str, name: str, engine: Path, cog: tuple[str, str] | None = None) -> Reference:
    reference = Reference.parse(f"{address}/{name}")
    scratch = engine.parent / "scratch"
    stop = threading.Event()
    return push(reference, engine, scratch, lambda _: None, stop, cog_weight=cog).reference


def inspect(*arguments: str | Path) -> tuple[int, str]:
    result = ran("inspect", *arguments)
    return result.exit_code, result.output


def document(*arguments: str | Path) -> dict[str, Any]:
    code, output = inspect("--json", *arguments)
    assert code == 0, output
    value: dict[str, Any] = json.loads(output)
    return value


def refusal(double: RegistryDouble, code: str = "E1306") -> str:
    status, output = inspect(f"oci://{double.address}/me/llm:v1")
    assert status == 1
    assert output.startswith(f"error: {code} ")
    return output


def tar(**files: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as file:
        for name, content in files.items():
            member = tarfile.TarInfo(name.replace("__", "."))
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def titled(layer: dict[str, Any], title: str) -> dict[str, Any]:
    return {**layer, "annotations": {TITLE: title}}


def layers(double: RegistryDouble, engine: Path, *without: str) -> list[dict[str, Any]]:
    """A layer for each file, as push makes them."""
    return [
        titled(double.add(tar(**{name.replace(".", "__"): path.read_bytes()})), name)
        for name, path in engine_manifest.files_of(engine).items()
        if name not in without
    ]


@pytest.mark.parametrize("cog", [None, COG], ids=["image", "Cog's weight"])
def test_it_tells_what_it_tells_of_the_directory_and_fetches_no_weights(
    cog: tuple[str, str] | None, registry: Registry, engine: Path
) -> None:
    name = f"told/{'weight' if cog else 'image'}"
    for rank in range(4):
        (engine / f"rank{rank}.engine").write_bytes(bytes([rank]) * (64 << 10))
    (engine / "cog-triton.json").unlink()
    pushed = send(registry.address, f"{name}:v1", with_manifest(engine), cog)
    told, local = document(f"oci://{registry.address}/{name}:v1"), document(engine)
    held = {one["digest"]: one["size"] for one in registry.manifest(name, "v1").json()["layers"]}
    fetched = registry.fetched(name)
    assert len(fetched) == (2 if cog is None else 3)
    assert max(held.get(digest, 0) for digest in fetched) < 64 << 10
    assert (told["path"], told["digest"]) == (str(pushed), pushed.digest)
    assert (told["kind"], local["digest"]) == ("registry", None)
    files = told.pop("files")
    assert {name for name, file in files.items() if file["verified"]} == {"config.json"}
    for file in (*files.values(), *local["files"].values()):
        del file["verified"]
    assert files == local.pop("files")
    differ = ("path", "kind", "digest")
    assert {key: told[key] for key in told if key not in differ} == {
        key: local[key] for key in local if key not in differ
    }


def test_the_table_has_the_digest_and_says_what_was_not_fetched(
    registry: Registry, engine: Path
) -> None:
    pushed = send(registry.address, "table/llm:v1", engine)
    code, output = inspect(f"oci://{registry.address}/table/llm@{pushed.digest}")
    assert code == 0
    assert max(map(len, output.splitlines())) <= 80
    assert pushed.digest is not None
    assert pushed.digest in output.replace("\n", "").replace(" ", "")
    assert "Qwen3ForCausalLM" in output
    rows = {line.split()[0]: line.split()[-1] for line in output.splitlines() if " 0.0 " in line}
    assert (rows["config.json"], rows["rank0.engine"]) == ("ok", "-")
    assert "5 files were not fetched" in output


def test_files_that_share_a_layer_are_found_in_it(
    double: RegistryDouble, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_blobs, "MAX_LAYERS", 4)
    send(double.address, "me/llm:v1", engine)
    titles = [one["annotations"][TITLE] for one in json.loads(double.manifests["v1"])["layers"]]
    assert "cog-triton.json" not in titles
    told = document(f"oci://{double.address}/me/llm:v1")
    assert told["architecture"] == "Qwen3ForCausalLM"
    assert len(told["files"]) == len(engine_manifest.files_of(engine))


def test_what_is_no_engine_is_refused(double: RegistryDouble, engine: Path) -> None:
    model = titled(double.add(tar(model__json=b"{}")), "cog-triton.json")
    config = titled(double.add(tar(config__json=b"{}")), "config.json")
    bomb = gzip.compress(tar(cog__triton__json=bytes(source.MAX_LAYER), more=b"x"))
    packed = titled(double.add(bomb, f"{image_manifest.TAR}+gzip"), "cog-triton.json")
    for said, held in {
        "rank2.engine is in the manifest but missing": layers(double, engine, "rank2.engine"),
        "config.json has 2 bytes, the manifest": [*layers(double, engine, "config.json"), config],
        "no small layer of it has cog-triton.json": [double.add(tar(program=b"x"))],
        "cog-triton.json is in two of its layers": [*layers(double, engine), model],
        f"has over {source.MAX_LAYER} bytes in it": [packed],
    }.items():
        double.tag("v1", held)
        assert said in refusal(double)


def test_large_layers_are_not_fetched(
    double: RegistryDouble, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "MAX_LAYER", 1 << 10)
    send(double.address, "me/llm:v1", engine)
    assert "must be at most 1024" in refusal(double)
    double.tag("v1", [double.add(tar(a=bytes(range(256)) * 8))])
    asked = len(double.asked("/blobs/"))
    assert "no small layer" in refusal(double)
    assert len(double.asked("/blobs/")) == asked


@pytest.mark.parametrize(
    ("config", "why"),
    [(b"[]", "its config is not Cog's"), (None, "its config is not Cog's: KeyError('sha256:0000")],
)
def test_a_broken_config_of_cog_is_refused(
    config: bytes | None, why: str, double: RegistryDouble, engine: Path
) -> None:
    lost = {"files": [{"path": "a.bin", "layer": f"sha256:{'0' * 64}"}]}
    kind = "application/vnd.cog.weight.config.v1+json"
    held = double.add(json.dumps(lost).encode() if config is None else config, kind)
    double.tag("v1", layers(double, engine), config=held)
    assert why in refusal(double)
