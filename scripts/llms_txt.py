#!/usr/bin/env python3
"""Write llms.txt, the map of docs/ for language models, from both READMEs.

.venv/bin/python scripts/llms_txt.py
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LLMS = ROOT / "llms.txt"
_PAGE = re.compile(r"^- \[([\w.-]+)\]\(([\w.-]+)\): (.+)$")
_FACTS = """\
- `make serve` needs Linux on x86-64 and no GPU; `cog-triton serve ENGINE` serves an engine.tar,
  a URL of one or a directory.
- Ports: Cog 5000 (`POST /predictions`), OpenAI 8080 (`/v1`, `/metrics`, `/health`), Triton 8000.
- Settings are environment variables. What cannot be honoured is refused by name.
- Errors begin with a code: E1xxx are the sender's to fix, E2xxx may pass when tried again.
- Each page begins with what it is for, and when it is not needed.
"""

_OTHERS = {
    "configs/build": "build configs of common models",
    "configs/serve": "serve configs",
    "deploy": "Helm chart, Compose, Slurm, a Grafana dashboard",
    "deploy/helm/values.yaml": "every value of the chart, with its reason",
}


def llms_txt() -> str:
    """The file's text: what the project is, facts that most questions need, a line a page."""
    summary = (ROOT / "README.md").read_text("utf-8").split("\n\n")[1]
    lines = ["# cog-triton", "", *(f"> {line}" for line in summary.splitlines()), "", _FACTS]
    lines += ["## Start", "", "- [README.md](README.md): from nothing to a served model"]
    for line in (ROOT / "docs" / "README.md").read_text("utf-8").splitlines():
        if line.startswith("## "):
            lines += ["", line, ""]
        elif page := _PAGE.match(line):
            lines.append(f"- [{page[1]}](docs/{page[2]}): {page[3]}")
    lines += ["", "## Optional", "", "- [CHANGELOG.md](CHANGELOG.md): what changed"]
    lines += [f"- [{path}]({path}): {what}" for path, what in _OTHERS.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    LLMS.write_text(llms_txt(), "utf-8")
