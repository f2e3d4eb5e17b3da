"""The clients' suite: docs/clients.md, the runners and the locks are of the same clients."""

from __future__ import annotations

import json
import re
import sys
from itertools import chain
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "clients"))
from suite import clients_page
from suite.client_list import CLIENTS, KINDS, LOCKS, NODE_LOCK, ROOT, RUNNERS, chosen
from suite.client_runs import Check, Row

_ROW = re.compile(r"^\| (\S+) \| (.+?) \| (\d+) of (\d+)(.*?) \| (.*) \|$", re.MULTILINE)


def test_runners_locks_and_groups_are_of_the_clients() -> None:
    assert {path.name for path in RUNNERS.glob("run_*")} == {c.runner.name for c in CLIENTS}
    names = {client.name for client in CLIENTS if not client.npm}
    inputs = "".join(lock.with_suffix(".in").read_text() for lock in LOCKS)
    assert names <= set(re.findall(r"^[\w-]+", inputs, re.MULTILINE))
    assert {kind for client in CLIENTS for kind in client.servers} == {*KINDS}
    assert chosen(["common", "rest"]) == chosen([]) == [*CLIENTS]
    with pytest.raises(ValueError, match="absent"):
        chosen(["openai", "absent"])


def test_rows_are_of_the_locked_versions_and_have_no_failure() -> None:
    """If not: make test-clients CLIENT=..."""
    rows = [*_ROW.finditer(clients_page.PAGE.read_text())]
    assert [(row[1], row[2]) for row in rows] == [(one.name, one.version()) for one in CLIENTS]
    assert [row[0] for row in rows if "FAILED" in row[5]] == []


@pytest.mark.parametrize("lock", sorted((ROOT / "requirements").glob("*.lock")))
def test_locks_have_a_hash_each_and_no_index(lock: Path) -> None:
    text = lock.read_text().replace("\\\n", " ")
    assert not re.search(r"://|^-", text, re.MULTILINE)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines
    assert all("==" in line and "--hash=sha256:" in line for line in lines)
    if lock in LOCKS:
        assert not re.search(r"^torch==", text, re.MULTILINE), "no client here computes anything"


def test_nodes_lock_has_a_hash_each_and_no_address() -> None:
    text = NODE_LOCK.read_text()
    assert "://" not in text
    packages = json.loads(text)["packages"]
    wanted = json.loads(NODE_LOCK.with_name("package.json").read_text())
    kinds = ("dependencies", "optionalDependencies")
    root = packages.pop("")
    assert [root[kind] for kind in kinds] == [wanted[kind] for kind in kinds]
    assert {client.npm for client in CLIENTS if client.npm} <= {*chain(*map(wanted.get, kinds))}
    assert all(each["integrity"].startswith("sha512-") for each in packages.values())


def test_the_page_leaves_rows_of_clients_that_did_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = CLIENTS[:2]
    monkeypatch.setattr(clients_page, "PAGE", tmp_path / "clients.md")
    ok, broken = Check("chat", True, ""), Check("tools", False, "it broke")
    rows = [Row(first, [ok]), Row(second, [ok, broken])]
    clients_page.write(rows)
    before = clients_page.PAGE.read_text()
    assert "| 1 of 2; FAILED: tools | chat, tools |" in before
    clients_page.write([Row(second, [ok])])
    after = clients_page.PAGE.read_text()
    assert f"| {first.name} | {first.version()} | 1 of 1 | chat |" in after
    assert f"| {second.name} | {second.version()} | 1 of 1 | chat |" in after
    assert [row.well for row in (*rows, Row(first, []))] == [True, False, False]
