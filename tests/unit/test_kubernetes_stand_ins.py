"""What stands in for an image and for kube-proxy in tests/kubernetes, without a cluster."""

from __future__ import annotations

import hashlib
import json
import ssl
import sys
import tarfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "kubernetes"))

import certificates  # noqa: E402
import service_rules  # noqa: E402
import stand_in_image  # noqa: E402


def test_the_archive_is_whole_and_its_images_are_named(tmp_path: Path) -> None:
    with tarfile.open(stand_in_image.write(tmp_path / "images.tar")) as archive:
        held: dict[str, bytes] = {}
        for member in archive.getmembers():
            opened = archive.extractfile(member)
            assert opened is not None
            held[member.name] = opened.read()

    def blob(described: dict[str, Any]) -> bytes:
        data = held["blobs/" + described["digest"].replace(":", "/")]
        assert described["digest"] == f"sha256:{hashlib.sha256(data).hexdigest()}"
        assert described["size"] == len(data)
        return data

    index = json.loads(held["index.json"])
    names = [one["annotations"]["io.containerd.image.name"] for one in index["manifests"]]
    assert names == [stand_in_image.IMAGE, stand_in_image.PAUSE]
    for described in index["manifests"]:
        manifest = json.loads(blob(described))
        config = json.loads(blob(manifest["config"]))
        assert config["rootfs"]["diff_ids"] == [one["digest"] for one in manifest["layers"]]
        assert all(blob(one) for one in manifest["layers"])


def test_the_image_has_a_place_for_each_of_this_machines_directories() -> None:
    values = stand_in_image.mounts()
    names = [one["name"] for one in values["extraVolumes"]]
    assert names == [one["name"] for one in values["extraVolumeMounts"]]
    paths = {one["mountPath"] for one in values["extraVolumeMounts"]}
    assert {"/usr", sys.base_prefix, str(ROOT)} <= paths
    assert all(one["readOnly"] for one in values["extraVolumeMounts"])


def test_connections_to_a_service_are_shared_by_its_ready_endpoints() -> None:
    def endpoint(address: str, ready: bool) -> dict[str, Any]:
        return {"addresses": [address], "conditions": {"ready": ready}}

    services = [
        {
            "metadata": {"name": "llm"},
            "spec": {"clusterIP": "10.96.0.9", "ports": [{"name": "openai", "port": 8080}]},
        },
        {"metadata": {"name": "bare"}, "spec": {"clusterIP": "None", "ports": [{"port": 1}]}},
    ]
    slices = [
        {
            "metadata": {"labels": {"kubernetes.io/service-name": "llm"}},
            "ports": [{"name": "openai", "port": 8081}],
            "endpoints": [endpoint("10.244.1.9", True), endpoint("10.244.1.8", True)],
        },
        {
            "metadata": {"labels": {"kubernetes.io/service-name": "llm"}},
            "ports": [{"name": "openai", "port": 8081}],
            "endpoints": [endpoint("10.244.2.7", False)],
        },
    ]
    first, second = service_rules._rules(services, slices)
    assert "-d 10.96.0.9/32 -p tcp --dport 8080" in first
    assert "--probability 0.500000 -j DNAT --to-destination 10.244.1.8:8081" in first
    assert "--probability 1.000000 -j DNAT --to-destination 10.244.1.9:8081" in second


def test_the_certificates_are_of_one_authority(tmp_path: Path) -> None:
    certificates.write(tmp_path / "pki")
    for name in ("server", "admin"):
        context = ssl.create_default_context(cafile=tmp_path / "pki" / "ca.crt")
        context.load_cert_chain(tmp_path / "pki" / f"{name}.crt", tmp_path / "pki" / f"{name}.key")
