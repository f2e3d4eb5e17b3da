"""Documents about an image: SBOM, provenance, licences and references, without Nix."""

from __future__ import annotations

import json
from email.message import Message
from pathlib import Path

import pytest
from image_commands.documents import debian_packages, declared, distributions, predicate, sbom
from image_commands.image import Image
from image_commands.registry import Reference, holds_nvidia

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WHEEL = {"file": "my_pkg-1.0-py3-none-any.whl", "hash": "sha256-" + "A" * 43 + "="}
STORE = "/nix/store/00000000000000000000000000000000-tree-1.2"


def metadata(**fields: str) -> Message:
    """Metadata of a distribution."""
    message = Message()
    for name, value in fields.items():
        message[name.replace("_", "-")] = value
    return message


@pytest.fixture
def image(tmp_path: Path) -> Image:
    """An image of one layer, with a store path that is not here and a wheel that is in none."""
    layer = {"diff_ids": "sha256:" + "1" * 64, "History": {"created_by": "cog-triton: base"}}
    about = {"layers": [{**layer, "paths": [{"path": STORE}]}], "created": "2026-01-02T03:04:05Z"}
    about["image-config"] = {"Labels": {"org.opencontainers.image.licenses": "LicenseRef-Theirs"}}
    (tmp_path / "image.json").write_text(json.dumps(about))
    return Image(
        image=tmp_path / "image.json",
        reference="me:tag",
        tools={},
        home=None,
        licences={
            "components": {"my-pkg": "MIT"},
            "references": {"LicenseRef-Theirs": "their words"},
        },
        wheels=[{**WHEEL, "modified": "pruned to sm_90"}],
        source={
            "revision": COMMIT,
            "materials": {"flake.lock": "2" * 64},
            "inputs": {"nixpkgs": {"owner": "o", "repo": "r", "rev": COMMIT, "narHash": "sha256-"}},
        },
    )


@pytest.mark.parametrize(
    ("fields", "expression", "texts"),
    [
        (
            {"License_Expression": "MIT AND BSD-3-Clause", "License": "x"},
            "MIT AND BSD-3-Clause",
            {},
        ),
        ({"License": "MIT License"}, "MIT", {}),
        ({"License": "Apache-2.0 OR BSD-3-Clause"}, "Apache-2.0 OR BSD-3-Clause", {}),
        ({"Classifier": "License :: OSI Approved :: MIT License"}, "MIT", {}),
        ({"License": "BSD"}, "LicenseRef-BSD", {"LicenseRef-BSD": "BSD"}),
        (
            {"Classifier": "License :: OSI Approved :: BSD License"},
            "LicenseRef-BSD-License",
            {"LicenseRef-BSD-License": "BSD License"},
        ),
        (
            {"License_Expression": "LicenseRef-NVIDIA-Proprietary"},
            "LicenseRef-NVIDIA-Proprietary",
            {
                "LicenseRef-NVIDIA-Proprietary": "The metadata says: LicenseRef-NVIDIA-Proprietary",
            },
        ),
        (
            {"License": "Our terms (2026)\nYou may."},
            "LicenseRef-Our-terms-2026",
            {"LicenseRef-Our-terms-2026": "Our terms (2026)\nYou may."},
        ),
        ({}, "NOASSERTION", {}),
    ],
)
def test_declared_licence(fields: dict[str, str], expression: str, texts: dict[str, str]) -> None:
    assert declared(metadata(**fields)) == (expression, texts)


@pytest.mark.parametrize(
    ("text", "repository", "suffix"),
    [
        ("docker.io/me/x:1", "docker.io/me/x", ":1"),
        ("me/x", "docker.io/me/x", ""),
        ("x:1", "docker.io/library/x", ":1"),
        ("127.0.0.1:5000/x:1", "127.0.0.1:5000/x", ":1"),
        ("localhost/x", "localhost/x", ""),
        ("r8.im/me/x:1@sha256:ab", "r8.im/me/x", "@sha256:ab"),
    ],
)
def test_reference(text: str, repository: str, suffix: str) -> None:
    reference = Reference.parse(text, [])
    assert (reference.repository, reference.suffix) == (repository, suffix)
    assert not reference.plain_http
    assert str(reference.at("sha256:cd")) == f"{repository}@sha256:cd"


def test_a_registry_over_http_stays_so() -> None:
    reference = Reference.parse("127.0.0.1:5000/x", ["--dest-tls-verify=false"])
    assert reference.at("sha256:cd").plain_http


def test_sbom_tells_of_a_wheel_whose_metadata_was_left_out(image: Image) -> None:
    document = sbom(image)
    (wheel,) = [item for item in document["packages"] if "packageFileName" in item]
    assert (wheel["name"], wheel["versionInfo"]) == ("my-pkg", "1.0")
    assert wheel["checksums"] == [{"algorithm": "SHA256", "checksumValue": "0" * 64}]
    assert wheel["comment"] == "Modified after unpacking: pruned to sm_90"
    assert (wheel["licenseDeclared"], wheel["licenseConcluded"]) == ("NOASSERTION", "MIT")
    assert document["packages"][0]["licenseConcluded"] == "LicenseRef-Theirs"
    (info,) = document["hasExtractedLicensingInfos"]
    assert (info["licenseId"], info["extractedText"]) == ("LicenseRef-Theirs", "their words")
    assert document["creationInfo"]["created"] == "2026-01-02T03:04:05Z"


def test_sbom_of_another_image_has_another_namespace(image: Image) -> None:
    first = sbom(image)["documentNamespace"]
    assert first == sbom(image)["documentNamespace"]
    image.image.write_text(image.image.read_text() + "\n")
    assert first != sbom(image)["documentNamespace"]


def test_every_package_is_reached_from_the_document(image: Image) -> None:
    document = sbom(image)
    names = [item["SPDXID"] for item in document["packages"]]
    assert len(names) == len(set(names)) == 4
    arrows = [
        (item["spdxElementId"], item["relatedSpdxElement"]) for item in document["relationships"]
    ]
    assert {below for _, below in arrows} == set(names)
    assert {above for above, _ in arrows} <= {"SPDXRef-DOCUMENT", *names}


def test_installed_packages_are_found(tmp_path: Path) -> None:
    site = tmp_path / "opt/site-packages/My_Pkg-1.0.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: My.Pkg\nVersion: 1.0\n\nText: no\n"
    )
    (tmp_path / "opt/site-packages/empty-1.dist-info").mkdir()
    (found,) = distributions(tmp_path)
    assert (found.name, found.version) == ("my-pkg", "1.0")
    assert found.path == "opt/site-packages/My_Pkg-1.0.dist-info"
    (tmp_path / "var/lib/dpkg").mkdir(parents=True)
    (tmp_path / "var/lib/dpkg/status").write_text(
        "Package: a\nStatus: install ok installed\nArchitecture: all\nVersion: 1:2\n\n"
        "Package: b\nStatus: deinstall ok config-files\nArchitecture: all\nVersion: 3\n"
    )
    assert [*debian_packages(tmp_path)] == [("a", "1:2", "all", "debian")]


def test_provenance_of_a_clean_tree_names_its_commit(image: Image) -> None:
    source, lock, nixpkgs = predicate(image)["buildDefinition"]["resolvedDependencies"]
    assert source["digest"] == nixpkgs["digest"] == {"gitCommit": COMMIT}
    assert lock == {"name": "flake.lock", "digest": {"sha256": "2" * 64}}
    assert nixpkgs["uri"] == "git+https://github.com/o/r"
    changed = {**image.source, "revision": f"{COMMIT}-dirty"}
    object.__setattr__(image, "source", changed)
    source = predicate(image)["buildDefinition"]["resolvedDependencies"][0]
    assert "digest" not in source


def test_documents_name_the_public_home_if_there_is_one(image: Image) -> None:
    home = "https://example.com/me"
    for known, expected in ((None, "urn:cog-triton"), (home, f"git+{home}")):
        object.__setattr__(image, "home", known)
        definition = predicate(image)["buildDefinition"]
        assert definition["externalParameters"]["flake"] == expected
        assert definition["resolvedDependencies"][0]["uri"] == expected
        assert definition["buildType"].startswith(known or "urn:")
        space = sbom(image)["documentNamespace"]
        assert space.startswith(known or "https://spdx.org/spdxdocs/")


@pytest.mark.parametrize(
    ("labels", "held"), [({"cog-triton.sm": "86"}, True), ({"cog-triton.sm": "cpu"}, False)]
)
def test_images_for_gpus_hold_nvidias_libraries(
    labels: dict[str, str], held: bool, image: Image
) -> None:
    image.about["image-config"]["Labels"] = labels
    assert holds_nvidia(image) is held
