"""Pins of the images: the tables of nix/, flake.lock and nix/*.nix against locks and docs."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[2]
TABLE: list[dict[str, Any]] = json.loads((ROOT / "nix" / "wheels.json").read_text())
VERSIONS = ["3.11", "3.12"]
# What Ubuntu 24.04 and nixpkgs run: glibc 2.39 and later, so every tag up to it.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]


def group(name: str) -> dict[str, dict[str, str]]:
    """The wheels of a group, by distribution."""
    rows = {row["name"]: row for row in TABLE if name in row["groups"]}
    assert len(rows) == sum(name in row["groups"] for row in TABLE)
    return rows


def lock(name: str = "python") -> dict[str, tuple[str, set[str]]]:
    """Version and SHA-256s, in hex, of each distribution of a lock."""
    text = (ROOT / f"requirements/{name}.lock").read_text()
    pins = re.findall(r"^([\w.-]+)==(\S+) \\\n((?:    --hash=\S+(?: \\)?\n?)+)", text, re.MULTILINE)
    return {name: (pin, set(re.findall(r"sha256:(\w+)", hashes))) for name, pin, hashes in pins}


def tags(version: str) -> set[Tag]:
    """What a wheel may be for, in an image with this Python."""
    number = tuple(map(int, version.split(".")))
    return {*cpython_tags(number, platforms=PLATFORMS), *compatible_tags(number, None, PLATFORMS)}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_wheel_has_the_hash_of_the_lock(version: str) -> None:
    found: list[str] = []
    for name in ("cog", "cpu", "tests"):
        members = group(f"{version} {name}")
        check(members, lock(), tags(version))
        found += members
    assert sorted(found) == sorted(lock().keys() - {"pip", "uv"})


def check(
    members: dict[str, dict[str, str]], pins: dict[str, tuple[str, set[str]]], usable: set[Tag]
) -> None:
    """Wheels are those of a lock, and can be installed."""
    for name, wheel in members.items():
        found, number, _, its_tags = parse_wheel_filename(wheel["file"])
        assert found == name
        assert str(number) == pins[name][0], name
        digest = base64.b64decode(wheel["hash"].removeprefix("sha256-")).hex()
        assert digest in pins[name][1], name
        assert its_tags & usable, wheel["file"]
        # fetchPypi makes a file name of five or six fields.
        assert wheel["file"].count("-") in (4, 5)


def test_vllm_images_have_all_wheels_of_their_lock() -> None:
    members, pins = group("3.12 vllm"), lock("vllm")
    check(members, pins, tags("3.12"))
    assert members.keys() == pins.keys()
    # The same wheels make the same layers.
    shared = {
        **group("3.12 cog"),
        "nvidia-pytriton": group("3.12 cpu")["nvidia-pytriton"],
    }
    assert {name: members.get(name) for name in shared} == shared


@pytest.mark.parametrize("version", VERSIONS)
def test_the_wheels_are_those_that_pyproject_asks_for(version: str) -> None:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        return {canonicalize_name(re.split(r"[ =<>;\[]", text)[0]) for text in requirements}

    sets = {name: set(group(f"{version} {name}")) for name in ("cog", "cpu")}
    assert names(project["dependencies"]) <= sets["cog"]
    assert names(project["optional-dependencies"]["cpu"]) <= sets["cog"] | sets["cpu"]
    only_dev = names(project["optional-dependencies"]["dev"])
    assert not only_dev & (sets["cog"] | sets["cpu"])
    assert not sets["cog"] & sets["cpu"]


def test_flake_inputs_are_pinned_each_with_its_own_nixpkgs() -> None:
    nodes = json.loads((ROOT / "flake.lock").read_text())["nodes"]
    ours = nodes["root"]["inputs"]
    assert set(ours) == {"nixpkgs", "nix2container"}
    # A name, not a path of names: nix2container follows no other input.
    theirs = nodes[ours["nix2container"]]["inputs"]["nixpkgs"]
    assert isinstance(theirs, str)
    assert theirs != ours["nixpkgs"]
    assert set(nodes) == {"root", *ours.values(), theirs}
    for name in (*ours.values(), theirs):
        locked = nodes[name]["locked"]
        assert re.fullmatch(r"[0-9a-f]{40}", locked["rev"])
        assert len(base64.b64decode(locked["narHash"].removeprefix("sha256-"))) == 32
    assert "nix flake update nixpkgs\n" in (ROOT / "scripts" / "update-pins").read_text()


LICENCES: dict[str, dict[str, str]] = json.loads((ROOT / "nix" / "licences.json").read_text())


@pytest.mark.parametrize("version", VERSIONS)
def test_every_wheel_has_a_licence(version: str) -> None:
    names = {*group(f"{version} cog"), *group(f"{version} cpu")}
    assert names <= LICENCES["wheels"].keys()
    for name in names & set(_installed()):
        # Not by [], which warns of a missing field from Python 3.12 on.
        (said,) = metadata.metadata(name).get_all("License-Expression", [""])
        if said and " OR " not in said:
            assert set(said.split(" AND ")) <= set(LICENCES["wheels"][name].split(" AND ")), name


def _installed() -> list[str]:
    return [canonicalize_name(found.metadata["Name"]) for found in metadata.distributions()]


def test_every_licence_without_an_spdx_name_is_explained() -> None:
    texts = [text for part in ("wheels", "nixpkgs", "ngc") for text in LICENCES[part].values()]
    named = {word for text in texts for word in re.findall(r"LicenseRef-[\w-]+", text)}
    assert named == LICENCES["references"].keys()


def test_nix_files_name_no_package_registry() -> None:
    for path in [ROOT / "flake.nix", *(ROOT / "nix").glob("*.*")]:
        assert not re.search(r"pypi\.org|pythonhosted|debian\.org|npmjs", path.read_text()), path


def test_prune_runs_with_only_the_files_that_pruner_nix_takes(tmp_path: Path) -> None:
    (pattern,) = re.findall(r'builtins.match "(.+?)" \(', (ROOT / "nix/pruner.nix").read_text())
    for path in ROOT.glob("cog_triton*/**/*.py"):
        name = path.relative_to(ROOT).as_posix()
        if re.fullmatch(pattern.replace("\\\\", "\\"), name):
            target = tmp_path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    (tmp_path / "tree").mkdir()
    command = [sys.executable, "-m", "cog_triton_prune", "--sm", "86", str(tmp_path / "tree")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_row_of_the_vllm_images_has_a_reason_and_known_keys() -> None:
    table: dict[str, Any] = json.loads((ROOT / "nix" / "vllm-image.json").read_text())
    for kind, keys in {
        "left_out": {"wheels", "reason"},
        "parts": {"name", "reason", "wheels", "pruned"},
        "dropped": {"paths", "reason", "kept_for"},
        "stripped": {"paths", "reason"},
    }.items():
        for row in table[kind]:
            assert row.keys() <= keys, row
            assert row["reason"].strip(), row
    names = [name for row in table["left_out"] + table["parts"] for name in row.get("wheels", [])]
    assert names == [canonicalize_name(name) for name in names]
    assert len(names) == len(set(names))
    paths = [path for row in table["dropped"] + table["stripped"] for path in row["paths"]]
    assert len(paths) == len(set(paths))
    assert [path for path in paths if path.startswith("/") or "{" in path] == []
