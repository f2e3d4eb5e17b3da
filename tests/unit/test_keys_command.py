"""``cog-triton keys`` and ``usage``: files of keys on the disk, and what tenants have used."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cog_triton.cli.accounts import COLUMNS, summed
from cog_triton.cli.app import app
from cog_triton.front.keyring import Keyring, read_keys


def ran(*arguments: str, text: str = "") -> Result:
    return CliRunner().invoke(app, list(arguments), input=text)


def test_a_key_is_shown_once_and_the_file_is_its_users_alone(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    options = ("--weight", "2", "--api", "openai", "--concurrent", "3", "--expires", "2099-01-31")
    added = ran("keys", "add", "team-a", "--file", str(file), *options)
    key = added.output.strip()
    assert added.exit_code == 0
    assert len(key) > 40
    assert key not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = Keyring(file).find(key.encode())
    assert found is not None
    assert (found.name, found.weight, found.apis, found.concurrent) == ("team-a", 2, ("openai",), 3)
    listed = ran("keys", "list", "--file", str(file)).output
    assert f"{found.id} team-a weight=2.0 concurrent=3 apis=openai expires=" in listed
    assert key not in listed


def test_revoked_keys_are_gone_and_comments_and_the_mode_stay(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\n")
    file.chmod(0o640)
    for name in ("a", "a", "b"):
        assert ran("keys", "add", name, "--file", str(file)).exit_code == 0
    ids = [key.id for key in read_keys(file)]
    assert ran("keys", "revoke", ids[0], "--file", str(file)).output == "1 revoked\n"
    assert [key.id for key in read_keys(file)] == ids[1:]
    assert ran("keys", "revoke", "a", "--file", str(file)).output == "1 revoked\n"
    assert [key.name for key in read_keys(file)] == ["b"]
    assert file.read_text().startswith("# ours\n\n{")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("add", "a b"), "keys:2: name: "),
        (("add", "a", "--weight", "0"), "keys:2: weight: "),
        (("add", "a", "--api", "all"), "keys:2: apis.0: "),
        (("add", "a", "--expires", "soon"), "--expires='soon': must be as 2027-01-31"),
        (("revoke", "nobody"), "'nobody': no key in"),
    ],
)
def test_what_is_wrong_changes_nothing(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    file = tmp_path / "keys"
    assert ran("keys", "add", "first", "--file", str(file)).exit_code == 0
    before = file.read_bytes()
    refused = ran("keys", *arguments, "--file", str(file))
    assert refused.exit_code == 1
    assert words in refused.output
    assert file.read_bytes() == before


def test_keys_that_are_added_at_once_are_all_there(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    command = [sys.executable, "-m", "cog_triton", "keys", "add"]
    environment = {**os.environ, "COG_TRITON_KEYS": str(file)}

    def add(name: str) -> int:
        return subprocess.run(
            [*command, name], env=environment, check=False, capture_output=True
        ).returncode

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(add, ["a", "b", "c"])) == [0, 0, 0]
    assert sorted(key.name for key in read_keys(file)) == ["a", "b", "c"]


def line(event: str = "request", **values: Any) -> str:
    return json.dumps({"timestamp": "2026-11-25T10:00:00.000Z", "event": event, **values})


USED = [
    "not JSON",
    '{"event": "request"',
    line("other", tenant="a"),
    "container | "
    + line(
        tenant="a",
        outcome="stop",
        prompt_tokens=5,
        output_tokens=7,
        queue_s=1,
        duration_s=3,
    ),
    line(tenant="a", outcome="error", prompt_tokens=1, output_tokens=1, queue_s=0, duration_s=1),
    line(tenant="a", outcome="error", prompt_tokens=9, output_tokens=0, duration_s=0.5),
    line(tenant="a", outcome="cancelled", prompt_tokens=9, output_tokens=0, duration_s=0.5),
    line("refused", tenant="b", code="E1005"),
    line(outcome="stop", prompt_tokens="x", output_tokens=1e300, queue_s=0.0, duration_s=2),
]


def test_usage_is_summed_by_tenant() -> None:
    found = summed(USED)
    assert found == {
        "a": dict(zip(COLUMNS, (3, 1, 1, 6, 8, 1.5, 3), strict=True)),
        "b": {**dict.fromkeys(COLUMNS, 0), "refused": 1},
        "-": {**dict.fromkeys(COLUMNS, 0), "requests": 1, "engine_s": 2},
    }


def test_usage_reads_files_or_stdin_from_a_time_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(USED))
    text = ran("usage", str(log)).output
    assert text.splitlines()[0].split() == ["tenant", *COLUMNS]
    assert text.splitlines()[2].split() == ["a", "3", "1", "1", "6", "8", "1.5", "3"]
    assert json.loads(ran("usage", "--json", text=log.read_text()).output)["b"]["refused"] == 1
    assert json.loads(ran("usage", "--json", "--since", "2026-11-26", str(log)).output) == {}
    absent = ran("usage", str(tmp_path / "none"))
    assert (absent.exit_code, "E1005" in absent.output) == (1, True)
