"""docs/clients.md: a row for each client, and where upstream what is not ours."""

from __future__ import annotations

import re
from collections.abc import Iterable

from suite.client_list import CLIENTS, ROOT
from suite.client_runs import Row

PAGE = ROOT / "docs" / "clients.md"
_HEAD = """\
# Clients

<!-- written by `make test-clients` -->

An API is compatible when the clients that people have work with it, unmodified. Look here for yours
before you port to this server; what differs by design is in [openai.md](openai.md).

Released clients ran against `cog-triton serve`: real Cog, real Triton, SmolLM2-135M on the CPU.
Where the likeliest tokens must be told, a server be full, or an agent's loop go as scripted, the
[mock engine](mock.md#answers-by-a-script) served. Scripts of other repositories are reproduced
from reading them, release by release (`tests/clients`).

`make test-clients` runs them and writes this page; `CLIENT=openai` runs one, `ARGS=--help` tells
more. Versions are pinned in `requirements/clients-*.lock`; clients for Node, and the coding agents,
come from npm.

"""
_PARSERS = re.compile(r"^## Parsers of vLLM\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
"""Section that is written by hand."""
_TABLES = {
    "Results": "| client | version | result | what was run |\n|---|---|---|---|",
    "Not ours": "| client | check | what upstream does |\n|---|---|---|",
}


def write(rows: Iterable[Row]) -> None:
    """Write the page: the rows of these runs, and those that it has of other clients."""
    old = PAGE.read_text("utf-8") if PAGE.exists() else ""
    ran = {row.client.name: row for row in rows}
    parts = [_HEAD]
    for title, head in _TABLES.items():
        lines = []
        for client in CLIENTS:
            if client.name not in ran:
                lines += _old_rows(old, title, client.name)
            elif title == "Results":
                lines.append(_result(ran[client.name]))
            else:
                lines += _not_ours(ran[client.name])
        if lines:
            mark = title.lower()
            parts.append(f"## {title}\n\n<!-- {mark} -->\n\n" + "\n".join([head, *lines]))
            parts.append(f"\n\n<!-- /{mark} -->\n\n")
    parts += _PARSERS.findall(old)
    PAGE.write_text("".join(parts).rstrip("\n") + "\n", "utf-8")


def _result(row: Row) -> str:
    passed = sum(check.ok for check in row.checks)
    result = f"{passed} of {len(row.checks)}"
    for word, some in (
        ("FAILED", [check.name for check in row.checks if not check.ok and not check.upstream]),
        ("not ours", [check.name for check in row.checks if not check.ok and check.upstream]),
    ):
        if some:
            result += f"; {word}: {', '.join(some)}"
    names = ", ".join(check.name for check in row.checks)
    return f"| {row.client.name} | {row.client.version()} | {result} | {names} |"


def _not_ours(row: Row) -> list[str]:
    return [
        f"| {row.client.name} | {check.name} | {check.upstream} |"
        for check in row.checks
        if not check.ok and check.upstream
    ]


def _old_rows(page: str, title: str, name: str) -> list[str]:
    part = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    return re.findall(rf"^\| {re.escape(name)} \|.*$", part[1], re.MULTILINE) if part else []
