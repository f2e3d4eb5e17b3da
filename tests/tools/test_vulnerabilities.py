"""scripts/vulnerabilities.py: an unknown vulnerability fails; a row has a reason and an end."""

from __future__ import annotations

import datetime
import json
import runpy
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "scripts" / "vulnerabilities.py")
ADVISORY = {
    "id": "GHSA-aaaa-bbbb-cccc",
    "aliases": ["CVE-2026-1"],
    "summary": "Reads too much",
    "affected": [
        {
            "package": {"ecosystem": "PyPI", "name": "Some_Package"},
            "ranges": [
                {
                    "type": "ECOSYSTEM",
                    "events": [{"introduced": "0"}, {"fixed": "1.2"}, {"introduced": "2.0rc1"},
                               {"last_affected": "2.1"}],
                }
            ],
            "versions": ["1.5.post1"],
        },
        {"package": {"ecosystem": "npm", "name": "some-package"},
         "ranges": [{"type": "SEMVER", "events": [{"introduced": "0"}]}]},
    ],
}  # fmt: skip


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(SCRIPT)


def written(directory: Path, **changes: Any) -> Path:
    """An export with the advisory."""
    with zipfile.ZipFile(directory / "all.zip", "w") as archive:
        archive.writestr("GHSA-aaaa-bbbb-cccc.json", json.dumps(ADVISORY | changes))
    return directory / "all.zip"


@pytest.mark.parametrize(
    ("version", "affected"),
    [
        ("0.1", True), ("1.2", False), ("1.2rc1", True), ("1.9", False), ("1.5.post1", True),
        ("2.0rc1", True), ("2.1", True), ("2.1.post1", False), ("2.1+cpu", False),
    ],
)  # fmt: skip
def test_ranges_are_those_of_osv(
    script: dict[str, Any], tmp_path: Path, version: str, affected: bool
) -> None:
    found = script["findings"]({("some-package", version), ("other", version)}, written(tmp_path))
    assert bool(found) is affected
    assert all(one.names == ("GHSA-aaaa-bbbb-cccc", "CVE-2026-1") for one in found)
    withdrawn = written(tmp_path, withdrawn="2026-01-01T00:00:00Z")
    assert script["findings"]({("some-package", version)}, withdrawn) == []


@pytest.mark.parametrize("changes", [{"affected": []}, {"affected": 5}, {"aliases": 5}])
def test_a_file_that_is_no_database_is_no_pass(
    script: dict[str, Any], tmp_path: Path, changes: dict[str, Any]
) -> None:
    export = written(tmp_path, **changes)
    assert script["main"](["--osv", str(export)]) == 2
    export.write_text("[]")
    assert script["main"](["--osv", str(export)]) == 2
    assert script["main"](["--osv", str(tmp_path / "absent")]) == 2


DAY = datetime.date(2026, 11, 23)


def row(script: dict[str, Any], **values: Any) -> Any:
    fields = {"id": "CVE-2026-1", "package": "some-package", "reason": "unused", "until": DAY}
    return script["Exemption"](**{**fields, **values})


def test_a_row_of_the_table_holds_until_its_day(script: dict[str, Any], tmp_path: Path) -> None:
    found = script["findings"]({("some-package", "1.1")}, written(tmp_path))
    standing, notes = script["judge"](found, [row(script)], DAY)
    assert (standing, notes) == (
        [],
        ["some-package: GHSA-aaaa-bbbb-cccc: not affected: unused"],
    )
    standing, notes = script["judge"](found, [row(script)], DAY + datetime.timedelta(1))
    assert standing == found
    assert "believed until 2026-11-23 only" in notes[0]
    for other in (row(script, package="other"), row(script, id="CVE-2026-2")):
        standing, notes = script["judge"](found, [other], DAY)
        assert standing == found
        assert "not found" in notes[0]


@pytest.mark.parametrize(
    "text",
    [
        "- {id: a, package: b, reason: c}",
        "- {id: a, package: b, reason: c, until: soon}",
        "- {id: a, package: b, reason: c, until: 2027-01-01, also: 1}",
    ],
)
def test_a_row_without_reason_or_end_is_refused(
    script: dict[str, Any], tmp_path: Path, text: str
) -> None:
    path = tmp_path / "not-affected.yaml"
    path.write_text("")
    assert script["read_exemptions"](path) == []
    path.write_text(text)
    with pytest.raises(script["NotLooked"], match="must have id, package, reason, until"):
        script["read_exemptions"](path)


def sbom(path: Path) -> Path:
    """An SPDX document with a Python package and a Debian one."""
    packages = [
        {"externalRefs": [{"referenceLocator": f"pkg:{one}"}]}
        for one in ("pypi/some_package@1.1%2Bcpu", "deb/ubuntu/bash@5")
    ]
    path.write_text(json.dumps({"packages": [*packages, {"name": "layer"}]}))
    return path


def test_an_sbom_is_held_against_the_database(
    script: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    osv, image = written(tmp_path), sbom(tmp_path / "image.spdx.json")
    assert script["main"](["--osv", str(osv)]) == 0
    assert "0 vulnerabilities" in capsys.readouterr().out
    assert script["main"](["--osv", str(osv), "--sbom", str(image)]) == 1
    out = capsys.readouterr().out
    assert "VULNERABLE: some-package 1.1+cpu: GHSA-aaaa-bbbb-cccc, CVE-2026-1" in out
    image.write_text("{}")
    assert script["main"](["--osv", str(osv), "--sbom", str(image)]) == 2
    assert "not looked: KeyError" in capsys.readouterr().err
