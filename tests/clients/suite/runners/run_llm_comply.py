"""llm-comply: answers and events of three APIs against the schemas of their makers."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

from checks import add, main, server

SCRIPTED = server("scripted")
REFUSED = {
    "openai-chat": "chat-image-input",
    "anthropic": "anth-image-input",
    "open-responses": "image-input",
}
"""By API: the test that is refused, for the mock reads no images."""


def conforms(api: str) -> str:
    """Run the tests of `api`: all pass or are skipped but one, by its HTTP status."""
    where = ["-u", SCRIPTED.openai, "-k", "none", "-m", SCRIPTED.model]
    done = subprocess.run(
        [sys.executable, "-m", "llm_comply.cli", "--format", api, *where, "--timeout=15", "--json"],
        capture_output=True,
        text=True,
    )
    results = json.loads(done.stdout)["results"]
    failed = {one["id"]: one["errors"] for one in results if one["status"] == "failed"}
    assert failed.keys() == {REFUSED[api]}, failed
    assert all(errors[0].startswith("HTTP 4") for errors in failed.values()), failed
    return f"{len(results) - len(failed)} of {len(results)}"


for name in REFUSED:
    add(name.replace("-", " "), partial(conforms, name))

if __name__ == "__main__":
    main()
