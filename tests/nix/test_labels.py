"""Labels of images: what Cog's own command line and registries read."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
import yaml
from containers import docker
from factory import REPOSITORY, SYSTEM, VERSION, Factory, Image, run, wheels

PROJECTS = {
    "cog-triton-runner-cpu": "runner",
    "cog-triton-runner-90": "runner",
    "cog-triton-builder": "builder",
}


@pytest.fixture(scope="module")
def images(factory: Factory) -> dict[str, Image]:
    """One image of each kind, built."""
    return {name: factory.image(name) for name in PROJECTS}


@pytest.mark.parametrize("name", PROJECTS)
def test_cogs_command_line_reads_the_config(name: str, images: dict[str, Image]) -> None:
    image, cpu = images[name], name.endswith("cpu")
    project = yaml.safe_load((REPOSITORY / PROJECTS[name] / "cog.yaml").read_text())
    most = project.get("concurrency", {"max": 1})["max"]
    # Fields and types of Cog's Go struct Config (pkg/config/config.go).
    assert json.loads(image.labels["run.cog.config"]) == {
        "build": {"gpu": not cpu, "python_version": VERSION if cpu else "3.12"},
        "predict": project["predict"],
        "concurrency": {"max": most},
    }
    assert int(image.env["COG_MAX_CONCURRENCY"]) == most
    assert "openapi" in json.loads(image.labels["run.cog.openapi_schema"])
    held = wheels("cog", *["cpu"] * cpu, python=VERSION if cpu else "3.12")
    pins = [f"{name}=={wheel['file'].split('-')[1]}" for name, wheel in held.items()]
    assert sorted(image.labels["run.cog.pip_freeze"].splitlines()) == sorted(pins)


def test_the_licence_label_names_what_is_in_the_image(images: dict[str, Image]) -> None:
    licences = {
        name: image.labels["org.opencontainers.image.licenses"] for name, image in images.items()
    }
    for text in licences.values():
        parts = text.split(" AND ")
        assert "Apache-2.0" in parts
        assert parts == sorted(set(parts))
    assert "GPL-3.0-or-later" in licences["cog-triton-runner-cpu"].split(" AND ")  # bash
    assert "LicenseRef-NVIDIA-TensorRT" in licences["cog-triton-runner-90"].split(" AND ")


def test_common_labels_are_there(factory: Factory, images: dict[str, Image]) -> None:
    date = run("git", "log", "-1", "--format=%cd", "--date=format-local:%FT%TZ", cwd=factory.source)
    for name, image in images.items():
        found = {key.rpartition(".")[2]: text for key, text in image.labels.items()}
        assert found["created"] == date.strip()
        assert found["title"] == name
        assert all(found[key] for key in ("description", "vendor"))
        assert not {"source", "url", "documentation"} & found.keys()  # there is no public home
        base = image.labels.get("org.opencontainers.image.base.name", "")
        assert base.startswith("" if name.endswith("cpu") else "nvcr.io/nvidia/tritonserver:")


def test_a_public_home_is_named_from_one_place(factory: Factory) -> None:
    project = factory.source / "pyproject.toml"
    text, home = project.read_text(), "https://example.com/me/cog-triton"
    project.write_text(f'{text}\n[project.urls]\nRepository = "{home}"\n')
    try:
        image = factory.image("cog-triton-runner-86")
        attribute = f"packages.{SYSTEM}.cog-triton-runner-86.meta.homepage"
        assert factory.nix("eval", "--raw", factory.attribute(attribute)) == home
    finally:
        project.write_text(text)
    labels = {key.rpartition(".")[2]: text for key, text in image.labels.items()}
    assert labels["source"] == labels["url"] == home
    assert labels["documentation"] == f"{home}/blob/main/docs/images.md"
    statement = json.loads(run(str(image.result), "provenance"))["predicate"]
    assert statement["buildDefinition"]["externalParameters"]["flake"] == f"git+{home}"
    assert json.loads(run(str(image.result), "sbom"))["documentNamespace"].startswith(home)


def test_licence_texts_are_in_the_image(cpu: Image) -> None:
    places = "cd /opt/cog-triton/licenses && head -2 LICENSE && cat components.txt && ls texts"
    said = docker("run", "--rm", "--network=none", cpu.reference, "bash", "-c", places)
    assert "Apache License" in said
    for name in ("coglet", "tokenizers"):  # whose wheels have no text
        assert re.search(rf"^{name} [\d.]+: Apache-2\.0$", said, re.MULTILINE)
    assert "LicenseRef-Ubuntu: each package under its own terms" in said
    assert {"Apache-2.0.txt", "GPL-3.0-or-later.txt", "GCC-exception-3.1.txt"} <= set(said.split())


def test_nix_run_is_the_image_command(factory: Factory) -> None:
    refused = factory.nix("run", factory.attribute("cog-triton-runner-cpu"), "--", "help")
    assert "./result load" in refused
    attribute = f"packages.{SYSTEM}.cog-triton-runner-cpu.meta"
    meta = json.loads(factory.nix("eval", "--json", factory.attribute(attribute)))
    assert meta["description"].startswith("Cog and Triton")
    licences = {one["fullName"]: one for one in meta["license"]}
    assert licences["Apache-2.0"] == {
        "fullName": "Apache-2.0",
        "free": True,
        "spdxId": "Apache-2.0",
    }
    unfree = {name for name, one in licences.items() if not one["free"]}
    assert "LicenseRef-NVIDIA-CUDA" in unfree  # CUDA's runtime in nvidia-pytriton
    assert all(" " not in one.get("spdxId", "") for one in meta["license"])
    assert not [name for name in unfree if "spdxId" in licences[name]]


def test_the_development_shell_finds_the_libraries_of_wheels(
    factory: Factory, images: dict[str, Image]
) -> None:
    attribute = factory.attribute(f"devShells.{SYSTEM}.default.LD_LIBRARY_PATH")
    found = factory.nix("eval", "--raw", attribute)
    assert found == images["cog-triton-runner-cpu"].env["LD_LIBRARY_PATH"]
    subprocess.run(["nix-store", "--realise", *re.findall(r"/nix/store/[^/:]+", found)], check=True)
