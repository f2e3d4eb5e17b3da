"""Push to a registry; a second push sends only new layers."""

from __future__ import annotations

from factory import Factory, run
from local_registry import Registry

INSECURE = "--dest-tls-verify=false"


def test_existing_layers_are_not_sent_again(factory: Factory, registry: Registry) -> None:
    first, second = factory.image("cog-triton-runner-86"), factory.image("cog-triton-runner-90")
    run(str(first.result), "push", f"{registry.address}/me/model:86", "--image-only", INSECURE)
    sent = registry.uploads()
    assert sent == len(first.about["layers"]) + 1  # and the configuration
    run(str(second.result), "push", f"{registry.address}/me/model:90", "--image-only", INSECURE)
    new = set(second.digests.values()) - set(first.digests.values())
    assert registry.uploads() - sent == len(new) + 1
    manifest = registry.manifest("me/model", "90").json()
    assert len(manifest["layers"]) == len(second.about["layers"])
    types = {layer["mediaType"] for layer in manifest["layers"]}
    assert types == {"application/vnd.oci.image.layer.v1.tar+zstd"}


def test_compression_is_chosen(factory: Factory, registry: Registry) -> None:
    image = factory.image("cog-triton-runner-86")
    pushed = f"{registry.address}/me/model:gzip"
    run(str(image.result), "push", pushed, "--compression", "gzip", "--image-only", INSECURE)
    manifest = registry.manifest("me/model", "gzip").json()
    types = {layer["mediaType"] for layer in manifest["layers"]}
    assert types == {"application/vnd.oci.image.layer.v1.tar+gzip"}
