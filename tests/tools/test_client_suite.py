"""The clients' suite: docs/clients.md, the runners and the locks are of the same clients."""

from __future__ import annotations

import json
import re
import sys
from itertools import chain
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "clients"))
from suite import client_runs, clients_page
from suite.client_list import CLIENTS, KINDS, LOCKS, NODE_LOCK, ROOT, RUNNERS, Client
from suite.client_runs import Check, Row

PAGE = ROOT / "docs" / "clients.md"
EACH = pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
_ROW = re.compile(r"^\| (\S+) \| (.+?) \| (\d+) of (\d+)(.*?) \| (.*) \|$", re.MULTILINE)


def test_runners_locks_and_rows_are_of_the_clients() -> None:
    assert {path.name for path in RUNNERS.glob("run_*")} == {c.runner.name for c in CLIENTS}
    names = {client.name for client in CLIENTS if client.lock and not client.npm}
    inputs = "".join(lock.with_suffix(".in").read_text() for lock in LOCKS)
    assert names <= set(re.findall(r"^[\w-]+", inputs, re.MULTILINE))
    assert [row[1] for row in _ROW.finditer(PAGE.read_text())] == [c.name for c in CLIENTS]
    assert {kind for client in CLIENTS for kind in client.servers} == {*KINDS}


@EACH
def test_a_row_is_of_the_locked_version_and_fails_through_no_fault_of_ours(client: Client) -> None:
    """If not: make test-clients CLIENT=..."""
    page = PAGE.read_text()
    (row,) = (row for row in _ROW.finditer(page) if row[1] == client.name)
    assert row[2] == client.version()
    assert "FAILED" not in row[5]
    _, _, not_ours = row[5].partition("; not ours: ")
    failed = [name for name in not_ours.split(", ") if name]
    assert len(failed) == int(row[4]) - int(row[3])
    for name in failed:
        reason = re.search(
            rf"^\| {client.name} \| {re.escape(name)} \| (.+) \|$", page, re.MULTILINE
        )
        assert reason is not None
        assert re.search(r"https://github\.com/\S+", reason[1]), "needs the upstream line or issue"


@EACH
def test_a_row_names_the_checks_of_its_runner(client: Client) -> None:
    if client.lock is None:
        return
    if client.runner.suffix == ".mjs":
        return  # some are named by what they loop over: the run alone tells
    shared = "coding_agent" if client.command else f"checks_{client.name.replace('-', '_')}_*"
    files = [client.runner, *RUNNERS.glob(f"{shared}.py")]
    text = "\n".join(path.read_text() for path in files)
    checks = re.findall(r"^ *@check\b.*?^ *def (\w+)\(", text, re.MULTILINE | re.DOTALL)
    (row,) = (row for row in _ROW.finditer(PAGE.read_text()) if row[1] == client.name)
    assert sorted(row[6].split(", ")) == sorted(name.replace("_", " ") for name in checks)


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


def test_the_page_keeps_rows_of_clients_that_did_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = CLIENTS[:2]
    monkeypatch.setattr(clients_page, "PAGE", tmp_path / "clients.md")
    found = [Check("chat", True, ""), Check("tools", False, "no", "https://github.com/a/b#L1")]
    clients_page.write([Row(first, found), Row(second, found[:1])])
    before = clients_page.PAGE.read_text()
    assert "| 1 of 2; not ours: tools | chat, tools |" in before
    assert f"| {first.name} | tools | https://github.com/a/b#L1 |" in before
    clients_page.write([Row(second, [Check("chat", False, "it broke")])])
    after = clients_page.PAGE.read_text()
    assert "| 0 of 1; FAILED: chat | chat |" in after
    assert after.splitlines()[:13] == before.splitlines()[:13]
    assert f"| {first.name} | tools |" in after


def test_the_page_is_as_the_suite_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PAGE.read_text()
    monkeypatch.setattr(clients_page, "PAGE", tmp_path / "clients.md")
    clients_page.PAGE.write_text(text)
    clients_page.write([])
    assert clients_page.PAGE.read_text() == text


def test_a_run_is_well_if_all_that_fails_is_not_ours() -> None:
    ok, theirs, ours = (
        Check("a", True, ""),
        Check("b", False, "", "https://github.com/a/b"),
        Check("c", False, ""),
    )
    assert client_runs.Row(CLIENTS[0], [ok, theirs]).well
    assert not client_runs.Row(CLIENTS[0], [ok, ours]).well
    assert not client_runs.Row(CLIENTS[0], []).well
