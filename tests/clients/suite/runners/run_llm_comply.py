"""llm-comply: answers and events of three APIs against the schemas of their makers."""

from __future__ import annotations

import json
import subprocess
import sys

from checks import check, main, server

SCRIPTED = server("scripted")


def conforms(api: str, *refused: str) -> str:
    """Run the tests of `api`: all pass or are skipped but `refused`, by their HTTP status alone."""
    where = ["-u", SCRIPTED.openai, "-k", "none", "-m", SCRIPTED.model]
    done = subprocess.run(
        [sys.executable, "-m", "llm_comply.cli", "--format", api, *where, "--timeout=15", "--json"],
        capture_output=True,
        text=True,
    )
    results = json.loads(done.stdout)["results"]
    failed = {one["id"]: one["errors"] for one in results if one["status"] == "failed"}
    assert failed.keys() == {*refused}, failed
    assert all(errors[0].startswith("HTTP 4") for errors in failed.values()), failed
    return f"{len(results) - len(failed)} of {len(results)}"


@check
def openai_chat() -> str:
    return conforms("openai-chat", "chat-image-input")  # the mock reads no images


@check
def anthropic() -> str:
    return conforms("anthropic", "anth-image-input")


@check
def open_responses() -> str:
    return conforms("open-responses", "image-input")


if __name__ == "__main__":
    main()
