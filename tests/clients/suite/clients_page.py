"""docs/clients.md: a row for each client."""

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
[mock engine](mock.md#answers-by-a-script) served.

The requests of four scripts are reproduced from reading them (`tests/clients`), and run in
`make test-full`: inflight_batcher_llm_client.py and end_to_end_grpc_client.py of
tensorrtllm_backend v0.7.2 and v0.19, samples/client.py of vllm_backend r23.10 and r25.12, and
test_perf.py and benchmark.py of replicate/cog-triton.

`make test-clients` runs them and writes this page; `CLIENT=openai` runs one, `CLIENT=common` the
first nine, and `ARGS=--help` has more. Versions are pinned in `requirements/clients-*.lock`;
clients for Node, and the coding agents, come from npm.

"""
_PARSERS = re.compile(r"^## Parsers of vLLM\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
"""Section that is written by hand."""
_TABLE = "| client | version | result | what was run |\n|---|---|---|---|"


def write(rows: Iterable[Row]) -> None:
    """Write the page: the rows of these runs, and those that it has of other clients."""
    old = PAGE.read_text("utf-8") if PAGE.exists() else ""
    ran = {row.client.name: _result(row) for row in rows}
    before = {row.split(" ")[1]: row for row in re.findall(r"^\| [\w-]+ \|.*$", old, re.MULTILINE)}
    found = {**before, **ran}
    lines = [found[client.name] for client in CLIENTS if client.name in found]
    table = "\n".join([_TABLE, *lines])
    parts = [_HEAD, f"## Results\n\n<!-- results -->\n\n{table}\n\n<!-- /results -->\n\n"]
    parts += _PARSERS.findall(old)
    PAGE.write_text("".join(parts).rstrip("\n") + "\n", "utf-8")


def _result(row: Row) -> str:
    failed = [check.name for check in row.checks if not check.ok]
    result = f"{len(row.checks) - len(failed)} of {len(row.checks)}"
    if failed:
        result += f"; FAILED: {', '.join(failed)}"
    names = ", ".join(check.name for check in row.checks)
    return f"| {row.client.name} | {row.client.version()} | {result} | {names} |"
