"""SBOM, provenance and signatures: what is said, attached, and refused when tampered with."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from factory import HERE, Factory, Image, run, wheels
from local_registry import Registry

BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
HTTP, INSECURE = "--tls-verify=false", "--dest-tls-verify=false"


@pytest.fixture(scope="module")
def cpu_image(factory: Factory) -> Image:
    """The CPU image, not loaded anywhere."""
    return factory.image("cog-triton-runner-cpu")


@pytest.fixture(scope="module")
def small(factory: Factory) -> Image:
    """A GPU image: of look-alikes, and so small."""
    return factory.image("cog-triton-runner-86")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a key that openssl made, and its public half."""
    directory = tmp_path_factory.mktemp("keys")
    options = ["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"]
    run("openssl", "genpkey", *options, "-out", str(directory / "key.pem"))
    run("openssl", "pkey", "-in", f"{directory}/key.pem", "-pubout", "-out", f"{directory}/key.pub")
    return directory


def document(image: Image, verb: str) -> dict[str, Any]:
    """What a command prints, twice the same."""
    text = run(str(image.result), verb)
    assert run(str(image.result), verb) == text
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def push(image: Image, registry: Registry, *options: str) -> str:
    """Push an image; returns its digest."""
    reference = f"{registry.address}/me/model:1"
    said = run(str(image.result), "push", reference, *options, INSECURE)
    return said.strip().removeprefix(f"{registry.address}/me/model@")


def verify(image: Image, key: Path, reference: str) -> subprocess.CompletedProcess[str]:
    """Run ./result verify."""
    command = [image.result, "verify", "--key", key, HTTP, reference]
    return subprocess.run(command, capture_output=True, text=True)


def refuses(image: Image, key: Path, registry: Registry, why: str) -> None:
    """./result verify fails, for this reason."""
    done = verify(image, key, f"{registry.address}/me/model:1")
    assert done.returncode == 1
    assert why in done.stderr


def referrers(registry: Registry, digest: str) -> list[dict[str, Any]]:
    """Manifests that refer to an image, from the index of OCI's referrers tag schema."""
    index = registry.manifest("me/model", digest.replace(":", "-")).json()
    assert index["mediaType"] == "application/vnd.oci.image.index.v1+json"
    found = [registry.manifest("me/model", item["digest"]).json() for item in index["manifests"]]
    assert all(item["subject"]["digest"] == digest for item in found)
    return found


def test_sbom_has_every_wheel_of_the_image(cpu_image: Image) -> None:
    sbom = document(cpu_image, "sbom")
    wanted = {
        wheel["file"]: base64.b64decode(wheel["hash"].removeprefix("sha256-")).hex()
        for wheel in wheels("cog", "cpu").values()
    }
    listed = [package for package in sbom["packages"] if "packageFileName" in package]
    found = {item["packageFileName"]: item["checksums"][0]["checksumValue"] for item in listed}
    assert found == wanted
    purls = {item["externalRefs"][0]["referenceLocator"] for item in listed}
    assert "pkg:pypi/nvidia-pytriton@0.7.0" in purls
    assert all(item["sourceInfo"].endswith(".dist-info") for item in listed)
    assert not [item["name"] for item in listed if item["licenseDeclared"] == "NOASSERTION"]


def test_sbom_has_every_store_path_of_the_layers(cpu_image: Image) -> None:
    sbom = document(cpu_image, "sbom")
    (described,) = re.findall(r'main\("(\S+)"', cpu_image.result.read_text())
    layers = json.loads(Path(json.loads(Path(described).read_text())["image"]).read_text())[
        "layers"
    ]
    wanted = {entry["path"] for layer in layers for entry in layer["paths"]}
    found = {item.get("sourceInfo") for item in sbom["packages"] if "-store-" in item["SPDXID"]}
    assert found == wanted
    diff_ids = {
        "sha256:" + item["checksums"][0]["checksumValue"]
        for item in sbom["packages"]
        if "SPDXRef-layer" in item["SPDXID"]
    }
    assert diff_ids == set(cpu_image.digests.values())


def test_sbom_is_valid_spdx(cpu_image: Image, small: Image, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"))
    python = str(tmp_path / "venv" / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    run(*pip, "--require-hashes", "--requirement", str(HERE / "spdx.lock"))
    for image in (cpu_image, small):
        file = tmp_path / "image.spdx.json"
        file.write_text(run(str(image.result), "sbom"))
        run(str(tmp_path / "venv" / "bin" / "pyspdxtools"), "--infile", str(file))


def test_provenance_says_what_it_was_built_from(cpu_image: Image, factory: Factory) -> None:
    statement = document(cpu_image, "provenance")
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    predicate = statement["predicate"]
    assert predicate["runDetails"]["builder"]["id"].endswith("#built-locally")
    assert "level" not in json.dumps(statement).lower()
    definition = predicate["buildDefinition"]
    assert definition["externalParameters"]["revision"] == factory.revision
    named = {item["name"]: item for item in definition["resolvedDependencies"]}
    for path in ("flake.lock", "nix/wheels.json", "requirements/python.lock"):
        digest = hashlib.sha256((factory.source / path).read_bytes()).hexdigest()
        assert named[path]["digest"] == {"sha256": digest}
    locked = json.loads((factory.source / "flake.lock").read_text())["nodes"]["nixpkgs"]["locked"]
    assert named["nixpkgs"]["digest"] == {"gitCommit": locked["rev"]}
    assert "digest" not in named["source"]  # the tests' tree has changes, and it says so
    assert named["source"]["annotations"]["uncommittedChanges"] is True


def test_push_attaches_the_documents(small: Image, registry: Registry) -> None:
    digest = push(small, registry)
    found = {item["artifactType"]: item for item in referrers(registry, digest)}
    assert set(found) == {"application/spdx+json", "application/vnd.in-toto+json"}
    texts = {
        kind: json.loads(registry.blob("me/model", item["layers"][0]["digest"]))
        for kind, item in found.items()
    }
    assert texts["application/spdx+json"] == document(small, "sbom")
    statement = texts["application/vnd.in-toto+json"]
    name = f"{registry.address}/me/model"
    expected = [{"name": name, "digest": {"sha256": digest.removeprefix("sha256:")}}]
    assert statement["subject"] == expected
    assert statement["predicate"] == document(small, "provenance")["predicate"]
    assert push(small, registry) == digest
    assert len(referrers(registry, digest)) == 2  # the same documents, not two more


def test_signed_image_verifies(small: Image, registry: Registry, keys: Path) -> None:
    digest = push(small, registry, "--key", str(keys / "key.pem"))
    name = f"{registry.address}/me/model"
    for reference in (f"{name}:1", f"{name}@{digest}"):
        done = verify(small, keys / "key.pub", reference)
        assert done.returncode == 0, done.stderr
        assert f"verified {name}@{digest}" in done.stdout
    types = [item["artifactType"] for item in referrers(registry, digest)]
    assert types.count(BUNDLE) == 3
    # As docs/supply-chain.md has it for those who have cosign and not this flake.
    options = ["--key", str(keys / "key.pub"), "--insecure-ignore-tlog"]
    run("cosign", "verify", *options, f"{name}:1")
    attested = {}
    for kind in ("spdxjson", "slsaprovenance1"):
        said = run("cosign", "verify-attestation", *options, "--type", kind, f"{name}:1")
        attested[kind] = json.loads(base64.b64decode(json.loads(said)["payload"]))["predicate"]
    assert attested["spdxjson"] == document(small, "sbom")
    assert attested["slsaprovenance1"] == document(small, "provenance")["predicate"]


def test_an_image_without_a_signature_does_not_verify(
    small: Image, registry: Registry, keys: Path
) -> None:
    push(small, registry)
    refuses(small, keys / "key.pub", registry, "no signatures found")


def test_another_digest_does_not_verify(
    small: Image, factory: Factory, registry: Registry, keys: Path
) -> None:
    signed = push(small, registry, "--key", str(keys / "key.pem"))
    other = push(factory.image("cog-triton-runner-90"), registry)
    # Its tag moved to the other, which is given the first one's signatures.
    index = registry.manifest("me/model", signed.replace(":", "-"))
    url = f"http://{registry.address}/v2/me/model/manifests/{other.replace(':', '-')}"
    command = ["curl", "-sf", "-X", "PUT", "--data-binary", "@-", url]
    header = f"Content-Type: {index.headers['content-type']}"
    subprocess.run([*command, "-H", header], input=index.content, check=True)
    refuses(small, keys / "key.pub", registry, other)


def test_forged_statements_do_not_verify(
    small: Image, factory: Factory, registry: Registry, keys: Path, tmp_path: Path
) -> None:
    signed = push(small, registry, "--key", str(keys / "key.pem"))
    other = push(factory.image("cog-triton-runner-90"), registry)
    # The first one's signatures, over statements that were made to name the other.
    bundles = [item for item in referrers(registry, signed) if item["artifactType"] == BUNDLE]
    assert len(bundles) == 3
    for number, item in enumerate(bundles):
        bundle = json.loads(registry.blob("me/model", item["layers"][0]["digest"]))
        payload = base64.b64decode(bundle["dsseEnvelope"]["payload"]).decode()
        forged = payload.replace(signed.removeprefix("sha256:"), other.removeprefix("sha256:"))
        assert forged != payload
        bundle["dsseEnvelope"]["payload"] = base64.b64encode(forged.encode()).decode()
        (tmp_path / f"{number}").write_text(json.dumps(bundle))
        target = f"{registry.address}/me/model@{other}"
        attach = ["oras", "attach", "--plain-http", "--artifact-type", BUNDLE, target]
        run(*attach, f"{number}:{BUNDLE}", cwd=tmp_path)
    refuses(small, keys / "key.pub", registry, "failed to verify signature")


def test_sign_refuses_another_image(
    small: Image, cpu_image: Image, registry: Registry, keys: Path
) -> None:
    push(small, registry)
    key = ["--key", str(keys / "key.pem"), HTTP]
    with pytest.raises(AssertionError, match="has other layers than cog-triton-runner-cpu"):
        run(str(cpu_image.result), "sign", *key, f"{registry.address}/me/model:1")
    run(str(small.result), "sign", *key, f"{registry.address}/me/model:1")
    assert verify(small, keys / "key.pub", f"{registry.address}/me/model:1").returncode == 0


def test_a_key_of_cosign_signs_and_another_key_does_not_verify(
    small: Image, registry: Registry, keys: Path, tmp_path: Path
) -> None:
    environment = {**os.environ, "COSIGN_PASSWORD": "a password"}
    command = ["cosign", "generate-key-pair", "--output-key-prefix", str(tmp_path / "mine")]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    push(small, registry)
    reference = f"{registry.address}/me/model:1"
    sign = [small.result, "sign", "--key", tmp_path / "mine.key", HTTP, reference]
    without = {name: value for name, value in os.environ.items() if name != "COSIGN_PASSWORD"}
    done = subprocess.run(sign, env=without, capture_output=True, text=True)
    assert done.returncode == 1
    assert "COSIGN_PASSWORD is not set" in done.stderr
    # A signature without SBOM and provenance is not enough.
    offline = ["--use-signing-config=false", "--tlog-upload=false", "--yes"]
    alone = ["cosign", "sign", "--key", tmp_path / "mine.key", *offline, reference]
    subprocess.run(alone, env=environment, check=True, capture_output=True)
    missing = "none of the attestations matched the predicate type: spdxjson"
    refuses(small, tmp_path / "mine.pub", registry, missing)
    subprocess.run(sign, env=environment, check=True, capture_output=True)
    assert verify(small, tmp_path / "mine.pub", reference).returncode == 0
    refuses(small, keys / "key.pub", registry, "failed to verify signature")


def test_push_reminds_of_nvidias_terms(small: Image, registry: Registry) -> None:
    reference = f"{registry.address}/me/terms:1"
    command = [small.result, "push", reference, "--image-only", INSECURE]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "docs/licences.md" in done.stderr
    digest = done.stdout.strip().removeprefix(f"{registry.address}/me/terms@")
    assert registry.manifest("me/terms", digest.replace(":", "-")).status_code == 404


def test_existing_layers_are_not_sent_again(
    small: Image, factory: Factory, registry: Registry
) -> None:
    other, options = factory.image("cog-triton-runner-90"), ["--image-only", INSECURE]
    run(str(small.result), "push", f"{registry.address}/me/model:86", *options)
    sent = registry.uploads()
    assert sent == len(small.about["layers"]) + 1  # and the configuration
    run(str(other.result), "push", f"{registry.address}/me/model:90", *options)
    new = set(other.digests.values()) - set(small.digests.values())
    assert registry.uploads() - sent == len(new) + 1
    manifest = registry.manifest("me/model", "90").json()
    assert len(manifest["layers"]) == len(other.about["layers"])
    types = {layer["mediaType"] for layer in manifest["layers"]}
    assert types == {"application/vnd.oci.image.layer.v1.tar+zstd"}
