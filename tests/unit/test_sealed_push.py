"""Pushes and pulls of sealed engines, to docker's registry: a new seal moves itself, no weights."""

from __future__ import annotations

import random
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from cuda_driver import has_compiler
from local_registry import Registry
from sealed_engines import CONFIG, SEAL, SealedBuilds, digest_of, manifest_of, unpacked

from cog_triton.oci.engine_pull import Puller
from cog_triton.oci.engine_push import Pushed, push
from cog_triton.oci.reference import Reference
from cog_triton.serving import sealed_engine
from cog_triton.settings import Settings

pytestmark = [
    pytest.mark.full,
    pytest.mark.usefixtures("home"),
    pytest.mark.skipif(not has_compiler(), reason="needs a C compiler"),
]
OTHER = "nvidia-h100-80gb-hbm3-sm90-x1"
WEIGHTS = random.Random(1).randbytes(8 << 20)


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An engine with its weights and one seal, and the same with a second one for another GPU."""
    made: list[Path] = []
    for gpu in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        builds = SealedBuilds(tmp_path_factory.mktemp("builds"), {"gpu_name": gpu})
        (builds.directory / "model" / "model.safetensors").write_bytes(WEIGHTS)
        added = [word for tar in made for word in ("--add-seal", str(tar))]
        made.append(builds.build(CONFIG, *added))
    return made[0], made[1]


def send(registry: Registry, tag: str, tar: Path, lines: list[str]) -> Pushed:
    reference = Reference.parse(f"{registry.address}/me/llm:{tag}")
    return push(reference, tar, tar.parent / "scratch", lines.append, threading.Event())


def stored(registry: Registry) -> dict[str, int]:
    """Bytes of each blob that the registry has, its manifests among them, by digest."""
    places = (registry.data / "docker/registry/v2/blobs").rglob("data")
    return {f"sha256:{path.parent.name}": path.stat().st_size for path in places}


def files_of(registry: Registry, tag: str) -> dict[str, int]:
    """Layers of a tag: digest and size."""
    layers = registry.manifest("me/llm", tag).json()["layers"]
    return {layer["digest"]: layer["size"] for layer in layers}


def test_a_new_seal_is_all_that_is_sent_and_fetched(
    registry: Registry, tars: tuple[Path, Path], tmp_path: Path
) -> None:
    lines: list[str] = []
    first = send(registry, "v1", tars[0], lines)
    assert first.sent == first.total > len(WEIGHTS)
    before, layers = stored(registry), files_of(registry, "v1")
    puller = Puller(tmp_path / "node", lines.append, threading.Event())
    engine = puller.pull(first.reference)
    assert (engine / "model.safetensors").read_bytes() == WEIGHTS
    fetched = registry.fetched("me/llm")

    second = send(registry, "v2", tars[1], lines)
    new = {digest: size for digest, size in stored(registry).items() if digest not in before}
    added = {digest: new[digest] for digest in files_of(registry, "v2") if digest not in layers}
    manifest = registry.manifest("me/llm", "v2")
    config = manifest.json()["config"]["digest"]
    assert len(added) == 2  # the seal, of nine files, and cog-triton.json
    assert {*new} == {*added, config, manifest.headers["Docker-Content-Digest"]}
    assert second.sent == sum(added.values()) + new[config]
    assert second.sent < len(WEIGHTS) / 100
    assert second.total - second.sent > len(WEIGHTS)

    both = puller.pull(second.reference)
    assert registry.fetched("me/llm") - fetched <= {*added, config}
    assert list(manifest_of(both).seals) == [OTHER, SEAL]
    assert (engine / "model.safetensors").samefile(both / "model.safetensors")
    assert digest_of(both) == digest_of(unpacked(tars[1], tmp_path / "unpacked"))

    given = Settings(COG_TRITON_WORK_DIR=str(tmp_path), SEAL_SHA256=str(second.reference.digest))
    trusted = sealed_engine.options(given, both, str(second.reference))
    assert trusted["sealed_manifest"] == digest_of(both)


@pytest.mark.skipif(shutil.which("cosign") is None, reason="needs cosign")
def test_an_engine_that_is_signed_by_a_given_key_is_trusted(
    registry: Registry,
    tars: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("COSIGN_PASSWORD", "")
    for name in ("ours", "others"):
        prefix = f"--output-key-prefix={tmp_path / name}"
        subprocess.run(["cosign", "generate-key-pair", prefix], check=True, capture_output=True)
    signed, unsigned = (send(registry, tag, tar, []) for tag, tar in zip("ab", tars, strict=True))
    offline = [
        "--use-signing-config=false",
        "--tlog-upload=false",
        "--allow-http-registry",
        "--yes",
    ]
    name = str(signed.reference).removeprefix("oci://").replace(":a@", "@")
    command = ["cosign", "sign", f"--key={tmp_path / 'ours.key'}", *offline]
    command += ["--allow-http-registry", name]
    subprocess.run(command, check=True, capture_output=True)
    engines = [unpacked(tar, tmp_path / str(number)) for number, tar in enumerate(tars)]

    def told(key: str, number: int, reference: object) -> dict[str, str]:
        caplog.clear()
        given = {"COG_TRITON_WORK_DIR": str(tmp_path / "server"), "SEAL_SIGNER": key}
        return sealed_engine.options(Settings(**given), engines[number], str(reference))

    ours, others = str(tmp_path / "ours.pub"), str(tmp_path / "others.pub")
    trusted = told(ours, 0, signed.reference)
    assert trusted["sealed_manifest"] == digest_of(engines[0])
    for key, number, reference, why in (
        (others, 0, signed.reference, "cosign verify"),
        (ours, 1, unsigned.reference, "cosign verify"),
        (ours, 0, "oci://127.0.0.1:5000/me/llm:a", "is for an engine in a registry"),
        (ours, 0, tars[0], "is for an engine in a registry"),
        (str(tmp_path / "absent.pub"), 0, signed.reference, "cosign verify"),
    ):
        assert told(key, number, reference) == {}
        assert "its seal is left unread: SEAL_SIGNER=" in caplog.text
        assert why in caplog.text
    monkeypatch.setenv("PATH", "/none")
    assert told(ours, 0, signed.reference) == {}
    assert "cosign, which checks signatures, is not in PATH" in caplog.text
