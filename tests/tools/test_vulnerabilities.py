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


def written(directory: Path, form: str) -> Path:
    """The advisory as an export of each form."""
    text = json.dumps(ADVISORY)
    if form == "zip":
        with zipfile.ZipFile(directory / "all.zip", "w") as archive:
            archive.writestr("GHSA-aaaa-bbbb-cccc.json", text)
        return directory / "all.zip"
    if form == "directory":
        (directory / "osv").mkdir()
        (directory / "osv" / "one.json").write_text(text)
        return directory / "osv"
    path = directory / "osv.json"
    path.write_text({"file": text, "list": f"[{text}]", "answer": f'{{"vulns": [{text}]}}'}[form])
    return path


@pytest.mark.parametrize("form", ["zip", "directory", "file", "list", "answer"])
def test_an_export_of_every_form_is_read(script: dict[str, Any], tmp_path: Path, form: str) -> None:
    places = {("some-package", "1.1"): ["a.lock"], ("other", "1.1"): ["a.lock"]}
    (finding,) = script["by_file"](places, written(tmp_path, form))
    assert (finding.package, finding.version) == ("some-package", "1.1")
    assert finding.names == ("GHSA-aaaa-bbbb-cccc", "CVE-2026-1")
    assert finding.fixed == ("1.2",)


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
    found = script["by_file"]({("some-package", version): ["a"]}, written(tmp_path, "file"))
    assert bool(found) is affected


def test_a_withdrawn_advisory_is_none(script: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "osv.json"
    path.write_text(json.dumps(ADVISORY | {"withdrawn": "2026-01-01T00:00:00Z"}))
    assert script["by_file"]({("some-package", "1.1"): ["a"]}, path) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[1]", "no advisory of OSV"),
        ("[]", "no advisory on a package of PyPI"),
        (
            '{"id": "x", "affected": [{"package": {"ecosystem": "npm", "name": "a"}}]}',
            "no advisory",
        ),
        ("[" * 100_000, "recursion"),
        ('{"id": "x", "affected": 5}', "x is not in OSV's format"),
        ('{"id": "x", "affected": [5]}', "x is not in OSV's format"),
        ('{"id": "x", "affected": [{"package": {"ecosystem": "PyPI"}}]}', "x is not in OSV's"),
        (json.dumps(ADVISORY | {"aliases": 5}), "is not in OSV's format"),
    ],
)
def test_a_file_that_is_no_database_is_no_pass(
    script: dict[str, Any], tmp_path: Path, text: str, reason: str
) -> None:
    path = tmp_path / "osv.json"
    path.write_text(text)
    with pytest.raises(script["NotLooked"], match=reason):
        script["by_file"]({("some-package", "1.1"): ["a"]}, path)
    with pytest.raises(script["NotLooked"], match="No such file"):
        script["by_file"]({}, tmp_path / "absent")


DAY = datetime.date(2026, 11, 23)


def row(script: dict[str, Any], **values: Any) -> Any:
    fields = {"name": "CVE-2026-1", "package": "some-package", "reason": "unused", "until": DAY}
    return script["Exemption"](**{**fields, **values})


def test_a_row_of_the_table_holds_until_its_day(script: dict[str, Any], tmp_path: Path) -> None:
    places = {("some-package", "1.1"): ["a"]}
    findings = script["by_file"](places, written(tmp_path, "file"))
    standing, notes = script["judge"](findings, [row(script)], DAY)
    assert standing == []
    assert notes == [
        "some-package 1.1: GHSA-aaaa-bbbb-cccc, CVE-2026-1: not affected: unused",
    ]
    standing, notes = script["judge"](findings, [row(script)], DAY + datetime.timedelta(1))
    assert standing == findings
    assert "believed until 2026-11-23 only" in notes[0]
    for other in (row(script, package="other"), row(script, name="CVE-2026-2")):
        standing, notes = script["judge"](findings, [other], DAY)
        assert standing == findings
        assert "take it out" in notes[0]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("{}", "must have|must be a list"),
        ("a: 1", "must be a list"),
        ("- {id: a, package: b, reason: c}", "must have id, package, reason, until"),
        ("- {id: a, package: b, reason: c, until: soon}", "until: must be a date"),
        ("- {id: a, package: b, reason: '', until: 2027-01-01}", "reason: must be text"),
        ("- {id: a, package: b, reason: c, until: 2027-01-01, also: 1}", "no others"),
    ],
)
def test_a_row_without_reason_or_end_is_refused(
    script: dict[str, Any], tmp_path: Path, text: str, rule: str
) -> None:
    path = tmp_path / "not-affected.yaml"
    path.write_text(text)
    if text == "{}":  # as an empty file
        assert script["read_exemptions"](path) == []
        return
    with pytest.raises(script["NotLooked"], match=rule):
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
    osv, image = written(tmp_path, "zip"), sbom(tmp_path / "image.spdx.json")
    assert script["main"](["--osv", str(osv)]) == 0
    assert "0 vulnerabilities" in capsys.readouterr().out
    assert script["main"](["--osv", str(osv), "--sbom", str(image)]) == 1
    out = capsys.readouterr().out
    assert "VULNERABLE: some-package 1.1+cpu: GHSA-aaaa-bbbb-cccc, CVE-2026-1; fixed in 1.2" in out
    assert "in image.spdx.json" in out
    assert "1 packages of other systems: not looked at" in out
    image.write_text("{}")
    assert script["main"](["--osv", str(osv), "--sbom", str(image)]) == 2
    assert "is no SBOM" in capsys.readouterr().err


def test_what_is_shipped_is_looked_at(script: dict[str, Any]) -> None:
    for lock in script["SHIPPED"]:
        assert script["locked"](ROOT / "requirements" / f"{lock}.lock"), lock
    assert "vllm" in dict(script["locked"](ROOT / "requirements" / "vllm.lock"))


PIP_AUDIT = """
import json, pathlib, sys
given = pathlib.Path(sys.argv[sys.argv.index("--requirement") + 1]).read_text().split()
assert len({one.partition("==")[0] for one in given}) == len(given)  # as pip-audit wants it
if "--osv-url" in sys.argv:
    sys.exit("requests.exceptions.ConnectionError: unreachable")
rows = [dict(zip(("name", "version"), one.split("=="))) | {"vulns": []} for one in given]
for row in rows:
    if row["version"] == "1.1":
        row["vulns"] = [{"id": "PYSEC-1", "fix_versions": ["1.2"], "aliases": ["CVE-2026-1"],
                         "description": "Reads too much"}]
print(json.dumps({"dependencies": rows, "fixes": []}))
sys.exit(any(row["vulns"] for row in rows))
"""


def test_a_service_is_asked_by_pip_audit(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip_audit").mkdir()
    (tmp_path / "pip_audit" / "__main__.py").write_text(PIP_AUDIT)
    ask = script["by_service"]
    monkeypatch.setitem(ask.__globals__, "AUDIT", tmp_path)
    monkeypatch.setitem(ask.__globals__, "_bring_pip_audit", lambda: None)
    places = {("some-package", version): ["a"] for version in ("1.0", "1.1", "1.2")}
    (finding,) = ask(places, None, tmp_path)
    assert finding.version == "1.1"
    assert finding.names == ("PYSEC-1", "CVE-2026-1")
    with pytest.raises(script["NotLooked"], match="unreachable"):
        ask(places, "http://127.0.0.1:9/", tmp_path)
