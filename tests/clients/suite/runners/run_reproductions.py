"""Scripts of other repositories: the integration tests of our reproductions, a check each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

SELECTIONS = {
    "inflight_batcher": ("test_clients.py", "token_client or token_ids"),
    "end_to_end": ("test_clients.py", "text_client or prompt_of_a_batch"),
    "original_scripts": ("test_clients.py", "originals_scripts"),
    "vllm_sample": ("test_vllm.py", "sample"),
}
"""By module of tests/clients: file of tests/integration, and which of its tests."""


def main() -> None:
    """Run those of the client named first; tests of several releases are one check."""
    name = sys.argv[1]
    file, words = SELECTIONS[name]
    report = Path(".work/clients/work") / name / "report.xml"
    subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *(f"--junitxml={report}", "-k", words, f"tests/integration/{file}"),
        ],
        stdout=sys.stderr,
        check=False,  # the report has what failed
    )
    found: dict[str, list[ElementTree.Element]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        test = str(case.get("name")).partition("[")[0].removeprefix("test_")
        found.setdefault(test.replace("_", " "), []).append(case)
    for check, cases in found.items():
        failed = [case for case in cases if len(case)]
        detail = f"{len(cases) - len(failed)} of {len(cases)}"
        if failed:
            detail += f": {failed[0][0].get('message')}"
        print(json.dumps({"check": check, "ok": not failed, "detail": detail[:1000]}), flush=True)


if __name__ == "__main__":
    main()
