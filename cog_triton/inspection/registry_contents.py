"""Engine contents in a registry: by its manifest, which is fetched, and not its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from cog_triton.artifact import engine_manifest
from cog_triton.artifact.engine_config import CONFIG_NAME
from cog_triton.artifact.engine_manifest import MANIFEST_NAME, FileEntry
from cog_triton.download.retry import RetryPolicy
from cog_triton.download.transfer_progress import Echo
from cog_triton.errors import EngineCorrupt
from cog_triton.inspection.engine_contents import EngineContents
from cog_triton.oci import small_files
from cog_triton.oci.reference import Reference


def read(
    reference: Reference,
    echo: Echo,
    *,
    plain_http: Collection[str] = (),
    retry: RetryPolicy = RetryPolicy(),  # noqa: B008
) -> EngineContents:
    """Read the manifest and config.json of an engine; its other files are as the manifest says.

    Args:
        echo: gets the lines of retries.
        plain_http: registries that are reached without TLS.

    Raises:
        ModelUnavailable: it cannot be had, or is not what its digest says.
        EngineCorrupt: no engine of ours, a file is not there, or what was fetched is damaged.
    """
    names = (MANIFEST_NAME, CONFIG_NAME)
    found = small_files.read(reference, names, echo, plain_http=plain_http, retry=retry)
    texts = dict(found.contents)
    if MANIFEST_NAME not in texts:
        raise EngineCorrupt(
            f"{found.reference}: no small layer of it has {MANIFEST_NAME}, so what it is cannot be"
            " told before it is pulled; cog-triton push gives each file a layer"
        )
    manifest = engine_manifest.parse(texts[MANIFEST_NAME], f"{found.reference}: {MANIFEST_NAME}")
    files = {
        name: entry
        for name, entry in manifest.files.items()
        if found.held is None or name in found.held
    }
    files |= {
        name: FileEntry(size=len(text), sha256=hashlib.sha256(text).hexdigest())
        for name, text in texts.items()
    }
    return EngineContents(found.reference, "registry", None, dict(sorted(files.items())), texts)
