"""Pushes of engines to docker's registry and to one with faults, and what `inspect` says there."""

from __future__ import annotations

import base64
import gzip
import io
import json
import re
import tarfile
import threading
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from command_line import ran
from local_registry import Registry
from registry_double import Fault, RegistryDouble, Seen, digest_of
from sample_engines import V1, contents, directory, pack, with_manifest

from cog_triton.artifact import engine_manifest
from cog_triton.download.retry import RetryPolicy
from cog_triton.download.transfer_progress import size_text
from cog_triton.errors import BuildCancelled, EngineCorrupt, InvalidArgument, PushFailed
from cog_triton.oci import image_manifest, layer_blobs
from cog_triton.oci.engine_pull import Puller
from cog_triton.oci.engine_push import Pushed, push
from cog_triton.oci.reference import Reference
from cog_triton.sources import source

FAST = RetryPolicy(max_failures=3, max_failures_at_start=3, initial_s=0.001, max_s=0.01)
pytestmark = pytest.mark.usefixtures("home")


def send(
    address: str, name: str, engine: Path, lines: list[str] | None = None, **options: Any
) -> Pushed:
    echo = (lines if lines is not None else []).append
    scratch = engine.parent / "scratch"
    options = {"retry": FAST, **options}
    return push(
        Reference.parse(f"{address}/{name}"), engine, scratch, echo, threading.Event(), **options
    )


def pulled(reference: Reference, work: Path) -> dict[str, bytes]:
    path = Puller(work, lambda _: None, threading.Event(), retry=FAST).pull(reference)
    return contents(path)


@pytest.mark.parametrize("form", ["engine", "engine.tar", "engine.tar.gz", "engine.tar.zst"])
def test_every_form_of_an_engine_is_the_same_in_a_registry(
    form: str, registry: Registry, engine: Path, tmp_path: Path
) -> None:
    source = engine if form == "engine" else pack(engine, tmp_path / form)
    name = form.replace(".", "-")
    pushed = send(registry.address, f"forms/{name}:v1", source)
    assert pushed.sent == pushed.total
    assert pulled(pushed.reference, tmp_path / "work") == contents(engine)
    assert (
        pushed.reference.digest == send(registry.address, "forms/all:v1", engine).reference.digest
    )
    assert not list(tmp_path.glob("scratch/*"))


def test_what_is_there_is_not_sent_again(registry: Registry, engine: Path, tmp_path: Path) -> None:
    send(registry.address, "again/one:v1", engine)
    before = registry.uploads()
    lines: list[str] = []
    assert send(registry.address, "again/one:v2", engine, lines).sent == 0
    assert registry.uploads() == before
    assert any("8 of 8 blobs are there" in line for line in lines)
    other = send(registry.address, "again/other:v1", engine, mount_from="again/one")
    assert other.sent == 0
    assert registry.uploads() == before
    (engine / "tokenizer.json").write_text('{"another": 1}')
    (engine / "cog-triton.json").unlink()
    changed = send(registry.address, "again/one:v3", with_manifest(engine))
    assert registry.uploads() == before + 3  # the file, the manifest, the image's config
    assert pulled(changed.reference, tmp_path / "work") == contents(engine)


def test_an_image_is_what_runtimes_mount(registry: Registry, engine: Path) -> None:
    pushed = send(registry.address, "image/engine:v1", engine)
    manifest = registry.manifest("image/engine", "v1")
    assert manifest.headers["Docker-Content-Digest"] == pushed.reference.digest
    config = json.loads(registry.blob("image/engine", manifest.json()["config"]["digest"]))
    layers = manifest.json()["layers"]
    assert {layer["mediaType"] for layer in layers} == {"application/vnd.oci.image.layer.v1.tar"}
    assert config["rootfs"]["diff_ids"] == [layer["digest"] for layer in layers]
    assert (config["os"], config["architecture"]) == ("linux", "amd64")
    facts = config["config"]["Labels"]
    assert facts == manifest.json()["annotations"]
    assert facts["cog-triton.model_id"] == "Qwen/Qwen3-8B"
    assert facts["cog-triton.sm"] == "90"
    assert facts["cog-triton.version.tensorrt_llm"] == "1.2.1"


def test_a_managed_weight_of_cog_has_the_same_layers(
    registry: Registry, engine: Path, tmp_path: Path
) -> None:
    image = send(registry.address, "cog/llm:v1", engine)
    before = registry.uploads()
    weight = send(registry.address, "cog/llm:weight", engine, cog_weight=("llm", "/src/weights"))
    assert registry.uploads() == before + 1
    manifest = registry.manifest("cog/llm", "weight").json()
    assert manifest["artifactType"] == "application/vnd.cog.weight.v1"
    assert manifest["config"]["mediaType"] == "application/vnd.cog.weight.config.v1+json"
    config = json.loads(registry.blob("cog/llm", manifest["config"]["digest"]))
    sums = sorted(f"{file['digest'][7:]}  {file['path']}" for file in config["files"])
    assert config["setDigest"] == digest_of("\n".join(sums).encode())
    assert manifest["annotations"] == {
        "run.cog.weight.name": "llm",
        "run.cog.weight.target": "/src/weights",
        "run.cog.weight.set-digest": config["setDigest"],
    }
    assert pulled(weight.reference, tmp_path / "work") == contents(engine)
    assert weight.reference.digest != image.reference.digest


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(cut_after=1 << 20), Fault(cut_after=0)],
        [Fault(503), Fault(429, {"Retry-After": "0"})],
        [Fault(404)],
        [Fault(401, {"WWW-Authenticate": 'Basic realm="it"'})],
    ],
    ids=["cut", "busy", "gone", "login"],
)
def test_a_blob_that_failed_is_sent_again_and_no_other(
    faults: list[Fault], double: RegistryDouble, tmp_path: Path, home: Path
) -> None:
    (home / ".docker").mkdir(parents=True)
    login = {"auths": {double.address: {"auth": base64.b64encode(b"me:secret").decode()}}}
    (home / ".docker/config.json").write_text(json.dumps(login))
    engine = directory(tmp_path / "engine", V1, 0)
    weights = engine / "rank0.engine"
    weights.write_bytes(bytes(range(256)) * (4 << 12))
    with_manifest(engine)
    span = layer_blobs.Span(weights, 0, weights.stat().st_size)
    failed = layer_blobs.LayerBlob({weights.name: span}).describe(lambda _: None).digest
    sent: list[str] = []
    left = list(faults)

    def plan(seen: Seen) -> Fault | None:
        if seen.method != "PUT" or "/uploads/" not in seen.path:
            return None
        (digest,) = parse_qs(urlsplit(seen.path).query)["digest"]
        sent.append(digest)
        return left.pop(0) if digest == failed and left else None

    double.plan = plan
    lines: list[str] = []
    pushed = send(double.address, "me/llm:v1", engine, lines)
    assert pushed.sent == pushed.total
    assert any(f" {size_text(pushed.total)} in " in line for line in lines)
    assert sorted(sent) == sorted([*double.blobs, *[failed] * len(faults)])
    assert pulled(pushed.reference, tmp_path / "work") == contents(engine)


def test_a_stopped_push_ends(double: RegistryDouble, engine: Path) -> None:
    stop = threading.Event()

    def plan(seen: Seen) -> Fault | None:
        if seen.method == "PUT":
            stop.set()
            return Fault(503)
        return None

    double.plan = plan
    with pytest.raises(BuildCancelled):
        push(
            Reference.parse(f"{double.address}/me/llm"),
            engine,
            engine.parent / "scratch",
            lambda _: None,
            stop,
        )
    assert double.manifests == {}


@pytest.mark.parametrize(
    ("method", "status", "kind", "said", "most"),
    [
        ("PUT", 503, PushFailed, r"oci://.*503.*3 attempts", 99),
        ("POST", 403, InvalidArgument, "docker login", 3),  # of three threads
    ],
)
def test_a_registry_that_fails_is_given_up_and_a_refusal_is_not_retried(
    method: str,
    status: int,
    kind: type[Exception],
    said: str,
    most: int,
    double: RegistryDouble,
    engine: Path,
) -> None:
    double.plan = lambda seen: Fault(status) if seen.method == method else None
    with pytest.raises(kind, match=said):
        send(double.address, "me/llm:v1", engine)
    assert double.manifests == {}
    assert len(double.asked(method)) <= most


@pytest.mark.parametrize("name", ["rank0.engine", ".wh.config.json"])
def test_a_damaged_engine_and_a_whiteout_are_not_sent(
    name: str, double: RegistryDouble, engine: Path
) -> None:
    (engine / name).write_bytes(b"another")
    if name.startswith("."):
        (engine / "cog-triton.json").unlink()
        with_manifest(engine)
    with pytest.raises(EngineCorrupt, match=re.escape(name)):
        send(double.address, "me/llm:v1", engine)
    assert double.seen == []


COG = ("llm", "/src/weights")
TITLE = "org.opencontainers.image.title"


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


def tarred(**files: bytes) -> bytes:
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
        titled(double.add(tarred(**{name.replace(".", "__"): path.read_bytes()})), name)
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
    pushed = send(registry.address, f"{name}:v1", with_manifest(engine), cog_weight=cog)
    told, local = document(f"oci://{registry.address}/{name}:v1"), document(engine)
    held = {one["digest"]: one["size"] for one in registry.manifest(name, "v1").json()["layers"]}
    fetched = registry.fetched(name)
    assert len(fetched) == (2 if cog is None else 3)
    assert max(held.get(digest, 0) for digest in fetched) < 64 << 10
    assert (told["path"], told["digest"]) == (str(pushed.reference), pushed.reference.digest)
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
    model = titled(double.add(tarred(model__json=b"{}")), "cog-triton.json")
    config = titled(double.add(tarred(config__json=b"{}")), "config.json")
    bomb = gzip.compress(tarred(cog__triton__json=bytes(source.MAX_LAYER), more=b"x"))
    packed = titled(double.add(bomb, f"{image_manifest.TAR}+gzip"), "cog-triton.json")
    for said, held in {
        "rank2.engine is in the manifest but missing": layers(double, engine, "rank2.engine"),
        "config.json has 2 bytes, the manifest": [*layers(double, engine, "config.json"), config],
        "no small layer of it has cog-triton.json": [double.add(tarred(program=b"x"))],
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
    double.tag("v1", [double.add(tarred(a=bytes(range(256)) * 8))])
    asked = len(double.asked("/blobs/"))
    assert "no small layer" in refusal(double)
    assert len(double.asked("/blobs/")) == asked
