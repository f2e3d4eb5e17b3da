"""What stands in for an image and for a cluster's DNS in tests/kubernetes, without a cluster."""

from __future__ import annotations

import hashlib
import json
import ssl
import struct
import sys
import tarfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "kubernetes"))

import certificates  # noqa: E402
import name_server  # noqa: E402
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


def test_a_container_has_this_machines_directories_read_only() -> None:
    mounts = stand_in_image.mounts()
    assert {"/usr", sys.base_prefix, str(ROOT)} <= {one["destination"] for one in mounts}
    assert all(one["source"] == one["destination"] for one in mounts)
    assert all("ro" in one["options"] for one in mounts)


def test_a_service_has_an_address_and_nothing_else_has() -> None:
    name, other = "llm.default.svc.cluster.local", "example.com"
    addresses = {name: "10.96.0.9"}

    def asked(name: str, kind: int) -> bytes:
        labels = b"".join(bytes([len(one)]) + one.encode() for one in name.split("."))
        return b"\x12\x34\x01\x00\0\1\0\0\0\0\0\0" + labels + struct.pack("!BHH", 0, kind, 1)

    query = asked(name.upper(), 1)
    assert name_server.question(query) == (name, 1, len(query))
    told = name_server.answer(query, addresses)
    assert told[:2] == query[:2]
    assert told[3] & 15 == 0
    assert told.endswith(bytes([10, 96, 0, 9]))
    no_address = name_server.answer(asked(name, 28), addresses)
    assert (no_address[3] & 15, no_address[6:8]) == (0, b"\0\0")
    assert name_server.answer(asked(other, 1), addresses)[3] & 15 == 3


def test_the_certificates_are_of_one_authority(tmp_path: Path) -> None:
    certificates.write(tmp_path / "pki")
    for name in ("server", "admin"):
        context = ssl.create_default_context(cafile=tmp_path / "pki" / "ca.crt")
        context.load_cert_chain(tmp_path / "pki" / f"{name}.crt", tmp_path / "pki" / f"{name}.key")
