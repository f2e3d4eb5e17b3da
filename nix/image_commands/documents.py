"""Documents about an image: its SBOM (SPDX 2.3) and its provenance (in-toto, SLSA v1).

In the SBOM the image contains layers, a layer contains store paths, a store path the Python
distributions and Debian packages whose records lie in it. The provenance says what was built from
what. It claims no SLSA level: the one who built it wrote it, too. The same image has the same
documents, byte for byte.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterator
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from image_commands.image import Image

_STORE = re.compile(r"/nix/store/([0-9a-z]{32})-(.+)")
_VERSION = re.compile(r"(.+?)-(\d.*)")
_UNKNOWN = "NOASSERTION"
_REFERENCE = re.compile(r"LicenseRef-[A-Za-z0-9.-]+")
_LICENCE = "License :: "
# Words that mean one licence of SPDX's list; "BSD" and "Apache Software License" mean several.
_WORDS = {
    "3-clause bsd license": "BSD-3-Clause",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "isc license": "ISC",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "isc license (iscl)": "ISC",
    "the unlicense (unlicense)": "Unlicense",
}
_KNOWN = {*_WORDS.values(), "0BSD", "BSD-2-Clause", "CC0-1.0", "LGPL-2.1-only", "PSF-2.0"}
_KNOWN |= {"Python-2.0", "Zlib", "HPND", "CNRI-Python"}
_URN = "urn:cog-triton"


def sbom(image: Image) -> dict[str, Any]:
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
        "creationInfo": {
            "created": image.about["created"],
            "creators": ["Tool: cog-triton-image-commands"],
        },
        "packages": contents.packages,
        "relationships": contents.relationships,
    } | ({"hasExtractedLicensingInfos": extracted} if extracted else {})


def provenance(image: Image, name: str, digest: str) -> dict[str, Any]:
    """Return the statement about what `name` and `digest` (``sha256:...``) say."""
    algorithm, _, value = digest.partition(":")
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {algorithm: value}}],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": predicate(image),
    }


def predicate(image: Image) -> dict[str, Any]:
    """Return the statement's predicate, the same for every copy of the image."""
    source, home = image.source, image.home
    revision = source["revision"]
    # Without a public home, a name for the repository that was built from.
    uri = f"git+{home}" if home else _URN
    page = f"{home}/blob/main/docs/supply-chain.md" if home else f"{_URN}:supply-chain"
    flake: dict[str, Any] = {"name": "source", "uri": uri}
    if re.fullmatch(r"[0-9a-f]{40}", revision):
        flake["digest"] = {"gitCommit": revision}
    else:  # a tree with changes has no digest that names it
        flake["annotations"] = {"revision": revision, "uncommittedChanges": True}
    files = [
        {"name": path, "digest": {"sha256": digest}}
        for path, digest in sorted(source["materials"].items())
    ]
    inputs = [
        {
            "name": name,
            "uri": f"git+https://github.com/{locked['owner']}/{locked['repo']}",
            "digest": {"gitCommit": locked["rev"]},
            "annotations": {"narHash": locked["narHash"]},
        }
        for name, locked in sorted(source["inputs"].items())
    ]
    return {
        "buildDefinition": {
            "buildType": f"{page}#build-type",
            "externalParameters": {
                "flake": uri,
                "revision": revision,
                "image": image.reference.partition(":")[0],
                "system": "x86_64-linux",
            },
            "resolvedDependencies": [flake, *files, *inputs],
        },
        "runDetails": {"builder": {"id": f"{page}#built-locally"}},
    }


class _Contents:
    """Packages and relationships, as they are found."""

    def __init__(self, image: Image) -> None:
        self._image = image
        self._wheels: dict[tuple[str, str], dict[str, str]] = {}
        for wheel in image.wheels:
            name, version = wheel["file"].split("-")[:2]
            self._wheels[_canonical(name), version] = wheel
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
        for number, layer in enumerate(self._image.about["layers"]):
            history, digest = layer["History"], layer["diff_ids"].removeprefix("sha256:")
            below = self._add(
                f"layer-{number}",
                f"layer {history.get('created_by', '').removeprefix('cog-triton: ')}",
                None,
                top,
                comment=history.get("comment", ""),
                checksums=[{"algorithm": "SHA256", "checksumValue": digest}],
            )
            for entry in layer["paths"]:
                self._add_store_path(entry["path"], below)
        for key, wheel in sorted(self._wheels.items()):  # those whose metadata was left out
            identity = f"wheel-{key[0]}-{key[1]}"
            self._add_wheel(identity, Distribution(*key, "", Message()), wheel, top)

    def _add_store_path(self, path: str, layer: str) -> None:
        found = _STORE.fullmatch(path)
        if found is None:
            raise SystemExit(f"{path}: not a store path")
        split = _VERSION.fullmatch(found[2])
        name, version = (split[1], split[2]) if split else (found[2], None)
        identity = f"store-{found[1]}"
        known = f"SPDXRef-{identity}" in self._seen
        fields = {"sourceInfo": path, "licenseConcluded": self._concluded(name)}
        above = self._add(identity, name, version, layer, **fields)
        if known:
            return
        for item in distributions(Path(path)):
            wheel = self._wheels.pop((item.name, item.version), None)
            place = hashlib.sha256(item.path.encode()).hexdigest()[:8]
            self._add_wheel(f"python-{found[1][:8]}-{place}-{item.name}", item, wheel, above)
        for name, version, architecture, system in debian_packages(Path(path)):
            pin = f"{quote(name)}@{quote(version, safe='')}?arch={architecture}"
            unique = f"deb-{found[1][:8]}-{name}-{architecture}"
            self._add(unique, name, version, above, purl=f"pkg:deb/{system}/{pin}")

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
        fields: dict[str, Any] = {"licenseDeclared": expression, "licenseConcluded": concluded}
        if found.path:
            fields["sourceInfo"] = f"/{found.path}"
        if wheel is not None:
            digest = base64.b64decode(wheel["hash"].removeprefix("sha256-")).hex()
            fields["packageFileName"] = wheel["file"]
            fields["checksums"] = [{"algorithm": "SHA256", "checksumValue": digest}]
            fields["purl"] = f"pkg:pypi/{found.name}@{quote(found.version)}"
            if change := wheel.get("modified"):
                fields["comment"] = f"Modified after unpacking: {change}"
        self._add(identity, found.name, found.version, above, purpose="LIBRARY", **fields)

    def _concluded(self, name: str) -> str:
        """Return the licence that nix/licences.json has for a component."""
        return self._known(self._image.licences["components"].get(name, _UNKNOWN))

    def _known(self, expression: str) -> str:
        """Return an expression of nix/licences.json, and keep the words of its references."""
        references = self._image.licences["references"]
        for name in _REFERENCE.findall(expression):
            self.licences[name] = references[name]
        return expression

    def _add(
        self,
        identity: str,
        name: str,
        version: str | None,
        above: str | None,
        purpose: str | None = None,
        purl: str | None = None,
        **fields: Any,
    ) -> str:
        """Add a package and what contains it; None: the document describes it."""
        spdx = "SPDXRef-" + re.sub(r"[^A-Za-z0-9.-]", "-", identity)
        self.relationships.append(
            {
                "spdxElementId": above or "SPDXRef-DOCUMENT",
                "relationshipType": "CONTAINS" if above else "DESCRIBES",
                "relatedSpdxElement": spdx,
            }
        )
        if spdx not in self._seen:
            self._seen.add(spdx)
            package = {
                "SPDXID": spdx,
                "name": name,
                "downloadLocation": _UNKNOWN,
                "filesAnalyzed": False,
                "licenseConcluded": _UNKNOWN,
                "licenseDeclared": _UNKNOWN,
                "copyrightText": _UNKNOWN,
            }
            optional = {"versionInfo": version, "primaryPackagePurpose": purpose}
            package |= {key: value for key, value in (optional | fields).items() if value}
            if purl:
                kind = {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl"}
                package["externalRefs"] = [{**kind, "referenceLocator": purl}]
            self.packages.append(package)
        return spdx


class Distribution(NamedTuple):
    """Python distribution: its METADATA, and where that is in the image."""

    name: str
    version: str
    path: str
    metadata: Message


def distributions(tree: Path) -> Iterator[Distribution]:
    """Yield the distributions of a store path, in order of their paths."""
    for directory, names, _ in os.walk(tree):
        names.sort()
        for name in [name for name in names if name.endswith(".dist-info")]:
            names.remove(name)
            file = Path(directory, name, "METADATA")
            if file.is_file():
                fields = HeaderParser().parsestr(file.read_text("utf-8", errors="replace"))
                place = str(file.parent.relative_to(tree))
                yield Distribution(_canonical(fields["Name"]), fields["Version"], place, fields)


def debian_packages(tree: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, version, architecture and system of what dpkg's status says is installed."""
    status = tree / "var/lib/dpkg/status"
    if not status.is_file():
        return
    releases = [tree / name for name in ("etc/os-release", "usr/lib/os-release")]
    text = "\n".join(file.read_text() for file in releases if file.is_file())
    found = re.search(r'^ID="?(\w+)', text, re.MULTILINE)
    for stanza in re.split(r"\n\n+", status.read_text("utf-8", errors="replace").strip()):
        fields = HeaderParser().parsestr(stanza)
        if fields["Package"] and str(fields["Status"]).endswith(" installed"):
            system = found[1] if found else "debian"
            yield fields["Package"], fields["Version"], fields["Architecture"], system


def declared(metadata: Message) -> tuple[str, dict[str, str]]:
    """Return a distribution's licence expression, and the text behind each LicenseRef in it.

    What the metadata says in other words than SPDX's becomes a LicenseRef with those words.
    """
    if expression := metadata["License-Expression"]:
        return expression, _references(expression)
    words = str(metadata["License"] or "").strip()
    classifiers = [
        text.removeprefix(_LICENCE).rpartition(" :: ")[2]
        for text in metadata.get_all("Classifier", [])
        if text.startswith(_LICENCE)
    ]
    for said in (words, *(classifiers if len(classifiers) == 1 and not words else ())):
        if said.lower() in _WORDS:
            return _WORDS[said.lower()], {}
        operands = re.split(r" (?:AND|OR) ", said)
        if all(item in _KNOWN or _REFERENCE.fullmatch(item) for item in operands):
            return said, _references(said)
    text = words or "; ".join(classifiers)
    if not text:
        return _UNKNOWN, {}
    title = next(line.strip() for line in text.splitlines() if line.strip())
    slug = re.sub(r"[^A-Za-z0-9]+", "-", title[:100]).strip("-") or "unnamed"
    return f"LicenseRef-{slug}", {f"LicenseRef-{slug}": text}


def _references(expression: str) -> dict[str, str]:
    return dict.fromkeys(_REFERENCE.findall(expression), f"The metadata says: {expression}")


def _canonical(name: str) -> str:
    """Return a distribution's name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
