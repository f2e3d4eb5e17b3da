"""Image as nix2container describes it: configuration, layers and the store paths in them."""

from __future__ import annotations

import json
import subprocess
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
        """Parsed image.json; `created` is the source revision's time, in RFC 3339."""
        about: dict[str, Any] = json.loads(self.image.read_text())
        return about

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the image."""
        labels: dict[str, str] = self.about["image-config"].get("Labels", {})
        return labels

    def skopeo(
        self, verb: str, *arguments: str, stdout: int | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command of skopeo that reads the image."""
        command = [self.tools["skopeo"], "--insecure-policy", verb]
        return subprocess.Popen([*command, *arguments], stdout=stdout)

    def copy(
        self, target: str, *options: str, stdout: int | None = None
    ) -> subprocess.Popen[bytes]:
        """Start copying the image; --quiet, because progress would go into an archive."""
        source = f"nix:{self.image}"
        return self.skopeo("copy", "--quiet", *options, source, target, stdout=stdout)

    def archive(self, stdout: int | None = None) -> subprocess.Popen[bytes]:
        """Start writing the image as a docker archive, to standard output or a pipe."""
        return self.copy(f"docker-archive:/dev/stdout:{self.reference}", stdout=stdout)
