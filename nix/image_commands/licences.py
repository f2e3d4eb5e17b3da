"""Licence of a distribution as an SPDX expression, from the words of its metadata."""

from __future__ import annotations

import re
from email.message import Message

_CLASSIFIER = "License :: "
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
REFERENCE = re.compile(r"LicenseRef-[A-Za-z0-9.-]+")
_LONGEST = 100


def declared(metadata: Message) -> tuple[str, dict[str, str]]:
    """Return a licence expression, and the text behind each LicenseRef in it.

    What the metadata says in other words than SPDX's becomes a LicenseRef with those words.
    """
    if expression := metadata["License-Expression"]:
        return expression, _references(expression, expression)
    words = str(metadata["License"] or "").strip()
    classifiers = [
        text.removeprefix(_CLASSIFIER).rpartition(" :: ")[2]
        for text in metadata.get_all("Classifier", [])
        if text.startswith(_CLASSIFIER)
    ]
    for said in (words, *(classifiers if len(classifiers) == 1 and not words else ())):
        if said.lower() in _WORDS:
            return _WORDS[said.lower()], {}
        operands = re.split(r" (?:AND|OR) ", said)
        if all(item in _KNOWN or REFERENCE.fullmatch(item) for item in operands):
            return said, _references(said, said)
    text = words or "; ".join(classifiers)
    if not text:
        return "NOASSERTION", {}
    title = next(line.strip() for line in text.splitlines() if line.strip())
    slug = re.sub(r"[^A-Za-z0-9]+", "-", title[:_LONGEST]).strip("-") or "unnamed"
    return f"LicenseRef-{slug}", {f"LicenseRef-{slug}": text}


def _references(expression: str, text: str) -> dict[str, str]:
    return dict.fromkeys(REFERENCE.findall(expression), f"The metadata says: {text}")
