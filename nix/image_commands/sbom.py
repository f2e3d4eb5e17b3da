"""SBOM of an image: an SPDX 2.3 document of its layers, store paths, wheels and packages.

The image contains layers, a layer contains store paths, a store path the Python distributions and
Debian packages whose records lie in it. The same image has the same document, byte for byte.
"""

from __future__ import annotations

import base64
import hashlib
import re
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import quote

from image_commands.image import Image, name_of
from image_commands.installed import (
    DebianPackage,
    Distribution,
    canonical,
    debian_packages,
    distributions,
)
from image_commands.licences import REFERENCE, declared

_STORE = re.compile(r"/nix/store/([0-9a-z]{32})-(.+)")
_VERSION = re.compile(r"(.+?)-(\d.*)")
_UNKNOWN = "NOASSERTION"


def document(image: Image) -> dict[str, Any]:
    """Return the SPDX document."""
    contents = _Contents(image)
    contents.add_image()
    identity = hashlib.sha256(image.image.read_bytes()).hexdigest()
    extracted = [
        {"licenseId": name, "name": name, "extractedText": text}
        for name, text in sorted(contents.licences.items())
    ]
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": image.reference,
        # Without a site of one's own SPDX 2.3 (6.5.1) has this one, of which nothing is fetched.
        "documentNamespace": f"{image.home or 'https://spdx.org/spdxdocs'}/cog-triton-{identity}",
        "creationInfo": {"created": image.created, "creators": ["Tool: cog-triton-image-commands"]},
        "packages": contents.packages,
        "relationships": contents.relationships,
    } | ({"hasExtractedLicensingInfos": extracted} if extracted else {})


class _Contents:
    """Packages and relationships, as they are found."""

    def __init__(self, image: Image) -> None:
        self._image = image
        self._wheels = {key: wheel for wheel in image.wheels for key in [_key(wheel["file"])]}
        self._seen: set[str] = set()
        self.packages: list[dict[str, Any]] = []
        self.relationships: list[dict[str, str]] = []
        self.licences: dict[str, str] = {}

    def add_image(self) -> None:
        """Add everything."""
        name, _, tag = self._image.reference.rpartition(":")
        label = self._image.labels.get("org.opencontainers.image.licenses", _UNKNOWN)
        concluded = {"licenseConcluded": self._known(label)}
        top = self._add("image", name, tag, None, purpose="CONTAINER", **concluded)
        for number, layer in enumerate(self._image.layers):
            self._add_layer(f"layer-{number}", layer, top)
        for key, wheel in sorted(self._wheels.items()):  # those whose metadata was left out
            found = Distribution(*key, "", Message())
            self._add_wheel(f"wheel-{key[0]}-{key[1]}", found, wheel, top)

    def _add_layer(self, identity: str, layer: dict[str, Any], top: str) -> None:
        digest = layer["diff_ids"].removeprefix("sha256:")
        comment = layer["History"].get("comment", "")
        name = f"layer {name_of(layer)}"
        checksums = [{"algorithm": "SHA256", "checksumValue": digest}]
        below = self._add(identity, name, None, top, comment=comment, checksums=checksums)
        for entry in layer["paths"]:
            self._add_store_path(entry["path"], below)

    def _add_store_path(self, path: str, layer: str) -> None:
        found = _STORE.fullmatch(path)
        if found is None:
            raise SystemExit(f"{path}: not a store path")
        split = _VERSION.fullmatch(found[2])
        name, version = (split[1], split[2]) if split else (found[2], None)
        identity = f"store-{found[1]}"
        known = f"SPDXRef-{identity}" in self._seen
        concluded = self._concluded(name)
        fields = {"sourceInfo": path, "licenseConcluded": concluded}
        above = self._add(identity, name, version, layer, **fields)
        if known:
            return
        for item in distributions(Path(path)):
            wheel = self._wheels.pop((item.name, item.version), None)
            place = hashlib.sha256(item.path.encode()).hexdigest()[:8]
            self._add_wheel(f"python-{found[1][:8]}-{place}-{item.name}", item, wheel, above)
        for package in debian_packages(Path(path)):
            self._add_debian(f"deb-{found[1][:8]}", package, above)

    def _add_wheel(
        self, identity: str, found: Distribution, wheel: dict[str, str] | None, above: str
    ) -> None:
        expression, texts = declared(found.metadata)
        concluded = self._concluded(found.name)
        for name, text in texts.items():
            if name in self._image.licences["references"]:
                self._known(name)
                continue
            # Two texts under one name: the second gets a name of its own.
            own = name
            if self.licences.setdefault(name, text) != text:
                own = f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
                self.licences[own] = text
            expression = expression.replace(name, own)
        fields: dict[str, Any] = {"licenseDeclared": expression}
        fields["licenseConcluded"] = concluded
        if found.path:
            fields["sourceInfo"] = f"/{found.path}"
        if wheel is not None:
            digest = base64.b64decode(wheel["hash"].removeprefix("sha256-")).hex()
            fields["packageFileName"] = wheel["file"]
            fields["checksums"] = [{"algorithm": "SHA256", "checksumValue": digest}]
            fields["externalRefs"] = [_purl(f"pkg:pypi/{found.name}@{quote(found.version)}")]
            if change := wheel.get("modified"):
                fields["comment"] = f"Modified after unpacking: {change}"
        self._add(identity, found.name, found.version, above, purpose="LIBRARY", **fields)

    def _concluded(self, name: str) -> str:
        """Return the licence that nix/licences.json has for a component."""
        return self._known(self._image.licences["components"].get(name, _UNKNOWN))

    def _known(self, expression: str) -> str:
        """Return an expression of nix/licences.json, and keep the words of its references."""
        references = self._image.licences["references"]
        for name in REFERENCE.findall(expression):
            self.licences[name] = references[name]
        return expression

    def _add_debian(self, identity: str, package: DebianPackage, above: str) -> None:
        name, version = package.name, quote(package.version, safe="")
        purl = f"pkg:deb/{package.system}/{quote(name)}@{version}?arch={package.architecture}"
        unique = f"{identity}-{name}-{package.architecture}"
        self._add(unique, name, package.version, above, externalRefs=[_purl(purl)])

    def _add(
        self,
        identity: str,
        name: str,
        version: str | None,
        above: str | None,
        purpose: str | None = None,
        **fields: Any,
    ) -> str:
        """Add a package and what contains it; None: the document describes it."""
        spdx = "SPDXRef-" + re.sub(r"[^A-Za-z0-9.-]", "-", identity)
        kind = "DESCRIBES" if above is None else "CONTAINS"
        self.relationships.append(
            {
                "spdxElementId": above or "SPDXRef-DOCUMENT",
                "relationshipType": kind,
                "relatedSpdxElement": spdx,
            }
        )
        if spdx not in self._seen:
            self._seen.add(spdx)
            optional = {"versionInfo": version, "primaryPackagePurpose": purpose}
            package = {
                "SPDXID": spdx,
                "name": name,
                "downloadLocation": _UNKNOWN,
                "filesAnalyzed": False,
                "licenseConcluded": _UNKNOWN,
                "licenseDeclared": _UNKNOWN,
                "copyrightText": _UNKNOWN,
            }
            package |= {key: value for key, value in (optional | fields).items() if value}
            self.packages.append(package)
        return spdx


def _key(file: str) -> tuple[str, str]:
    name, version = file.split("-")[:2]
    return canonical(name), version


def _purl(locator: str) -> dict[str, str]:
    return {
        "referenceCategory": "PACKAGE-MANAGER",
        "referenceType": "purl",
        "referenceLocator": locator,
    }
