"""Image as nix2container describes it: configuration, layers and the store paths in them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Image:
    """Image that a ./result was built as; image-commands.nix writes the fields."""

    image: Path
    """nix2container's image.json."""
    reference: str
    """Name and tag."""
    tools: dict[str, str]
    """Paths of skopeo (with nix2container's transport), cosign and oras."""
    wheels: list[dict[str, str]]
    """Wheels that were unpacked into it: file, hash as Nix writes it, and what was modified."""
    source: dict[str, Any]
    """Flake that built it: revision, materials (path: SHA-256) and locked inputs."""
    home: str | None
    """Public URL of the repository, of pyproject.toml's project.urls."""
    licences: dict[str, dict[str, str]]
    """Of nix/licences.json: expressions of the components, words of the references in them."""

    @classmethod
    def read(cls, described: str) -> Image:
        """Read the fields from a JSON file."""
        fields = json.loads(Path(described).read_text())
        return cls(**{**fields, "image": Path(fields["image"])})

    @cached_property
    def about(self) -> dict[str, Any]:
        """Parsed image.json."""
        about: dict[str, Any] = json.loads(self.image.read_text())
        return about

    @property
    def layers(self) -> list[dict[str, Any]]:
        """Layers of image.json, the bottom first."""
        layers: list[dict[str, Any]] = self.about["layers"]
        return layers

    @property
    def created(self) -> str:
        """Time of the source's revision, in RFC 3339: the same image has the same documents."""
        created: str = self.about["created"]
        return created

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the image."""
        labels: dict[str, str] = self.about["image-config"].get("Labels", {})
        return labels


def name_of(layer: dict[str, Any]) -> str:
    """Name that nix/ gave a layer."""
    name: str = layer["History"].get("created_by", "")
    return name.removeprefix("cog-triton: ")
