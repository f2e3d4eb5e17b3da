"""nix/vllm-image.json: the form that the images are made from, and a reason for everything."""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.utils import canonicalize_name

NIX = Path(__file__).parents[2] / "nix"
TABLE: dict[str, Any] = json.loads((NIX / "vllm-image.json").read_text())
SMS = {int(sm) for sm in re.findall(r'^  "(\d+)" = \{', (NIX / "archs.nix").read_text(), re.M)}
MAY_HAVE = {
    "left_out": {"wheels", "reason"},
    "parts": {"name", "reason", "wheels", "pruned"},
    "dropped": {"paths", "reason", "kept_for"},
    "stripped": {"paths", "reason"},
}


def wheels(rows: str) -> list[str]:
    """Names of wheels in some rows of the table."""
    return [name for row in TABLE[rows] for name in row.get("wheels", [])]


def test_every_row_says_why_and_nothing_unknown() -> None:
    for kind, keys in MAY_HAVE.items():
        assert TABLE[kind]
        for row in TABLE[kind]:
            assert row.keys() <= keys, row
            assert row["reason"].strip(), row


def test_wheels_are_named_as_the_lock_names_them_and_once() -> None:
    names = wheels("left_out") + wheels("parts")
    assert names == [canonicalize_name(name) for name in names]
    assert len(names) == len(set(names))


def test_the_last_part_takes_the_rest() -> None:
    *parts, last = TABLE["parts"]
    assert "wheels" not in last
    assert all(part["wheels"] == sorted(part["wheels"]) for part in parts)
    names = [part["name"] for part in TABLE["parts"]]
    assert len(names) == len(set(names))


def test_paths_stay_below_site_packages() -> None:
    rows = TABLE["dropped"] + TABLE["stripped"]
    paths = [PurePosixPath(path) for row in rows for path in row["paths"]]
    assert len(paths) == len(set(paths))
    for path in paths:
        assert not path.is_absolute(), path
        assert ".." not in path.parts, path
        assert "{" not in str(path), "Path.glob has no alternatives"


def test_files_are_kept_for_architectures_that_have_an_image() -> None:
    for row in TABLE["dropped"]:
        kept_for = row.get("kept_for", [])
        assert set(kept_for) < SMS, row
        assert kept_for == sorted(set(kept_for)), row
