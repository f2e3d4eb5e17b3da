"""scripts/release.py: what is refused, what is made, and that nothing is done twice or leaves."""

from __future__ import annotations

import datetime
import hashlib
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
CHANGELOG = (
    "# Changelog\n\n## Unreleased\n\n## 0.3.0 - 2026-12-01\n\nWhat a user gains:\n\n- More\n"
)
MAKEFILE = "test-quick:\n\t@echo run >>../tested; test ! -e ../broken\n"
# As hatchling does it: both files, of the version in __init__.py.
HATCHLING = """
import pathlib, re, sys
place = pathlib.Path(sys.argv[sys.argv.index("-d") + 1])
version = re.search('= "(.+)"', pathlib.Path("cog_triton/__init__.py").read_text())[1]
(place / f"cog_triton-{version}-py3-none-any.whl").write_text("wheel")
(place / f"cog_triton-{version}.tar.gz").write_text("sdist")
"""
HELM = """
import pathlib, re
class Chart:
    def __init__(self, path): self.version = path.stem.removeprefix("cog-triton-")
    @classmethod
    def load(cls, path): return cls(path)
    def __enter__(self): return self
    def __exit__(self, *_): pass
class chart:
    @staticmethod
    def lint(path, values): return {"errors": values.get("wrong", [])}
    @staticmethod
    def package(path, destination):
        version = re.search(r"^version: (.+)", (path / "Chart.yaml").read_text(), re.M)[1]
        made = destination / f"cog-triton-{version}.tgz"
        made.write_text("chart")
        return str(made)
"""
# An image as `nix build` leaves it: it writes down what it is asked.
IMAGE = """#!/bin/sh
case $1 in
  sbom) echo '{"packages": []}' ;;
  provenance) echo '{}' ;;
  *) echo "$@" >>"$PUSHED" ; test ! -e "$PUSHED.broken" ;;
esac
"""
NIX = """#!/bin/sh
case "$*" in
  *" eval "*) echo '["default", "cpu"]' ;;
  *" build "*) while [ $# -gt 1 ] && [ "$1" != --out-link ]; do shift; done; cp "$IMAGE" "$2" ;;
  *" copy "*) echo "$@" >>"$COPIED" ;;
esac
"""


def git(repository: Path, *arguments: str) -> str:
    """Output of git."""
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small repository of version 0.3.0, in which tests, hatchling, Helm and Nix are doubles."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "TESTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "test")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "test@localhost")
    files = {
        "CHANGELOG.md": CHANGELOG,
        "Makefile": MAKEFILE,
        ".gitignore": "/dist/\n/.work/\n__pycache__/\n",
        "README.md": "$ make serve\ncog-triton 0.3.0: starting; the first\n",
        "cog_triton/__init__.py": '"""x"""\n\n__version__ = "0.3.0"\n',
        "deploy/one.yaml": '  labels:\n    app.kubernetes.io/version: "0.3.0"\n',
        "deploy/helm/Chart.yaml": 'apiVersion: v2\nversion: 0.3.0\nappVersion: "0.3.0" # its\n',
        "deploy/helm/examples/one.yaml": "image: {}\n",
        "scripts/setup-tools": "#!/bin/sh\n",
        "scripts/vulnerabilities.py": 'import os, sys\nprint("looked")\n'
        'sys.exit(int(os.environ.get("FOUND", "0")))\n',
        ".work/tools/helm_python.py": HELM,
    }
    root = tmp_path / "repository"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if text.startswith("#!"):
            path.chmod(0o755)
    programs = tmp_path / "programs"
    (programs / "hatchling").mkdir(parents=True)
    (programs / "hatchling" / "__init__.py").touch()
    (programs / "hatchling" / "__main__.py").write_text(HATCHLING)
    for name, text in {"nix": NIX, "image": IMAGE}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(programs))
    monkeypatch.setenv("IMAGE", str(programs / "image"))
    monkeypatch.setenv("PUSHED", str(tmp_path / "pushed"))
    monkeypatch.setenv("COPIED", str(tmp_path / "copied"))
    git(tmp_path, "init", "--quiet", "--initial-branch=main", str(root))
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "Begin")
    before = list(sys.path)
    yield root
    sys.path[:] = before
    sys.modules.pop("helm_python", None)


@pytest.fixture
def release(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Runs the script on the repository: the exit status and what was told."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = runpy.run_path(str(SCRIPTS / "release.py"))

    def run(*arguments: str, version: str = "0.3.0") -> tuple[int, str]:
        code = script["main"]([version, *arguments], repository)
        told = capsys.readouterr()
        return code, told.out + told.err

    return run


def change(repository: Path, name: str, text: str) -> None:
    """Commit a file's new text."""
    (repository / name).write_text(text)
    git(repository, "commit", "--quiet", "--all", "--message", "Change")


def test_a_rehearsal_makes_everything_but_a_tag_and_a_push(
    release: Any, repository: Path, tmp_path: Path
) -> None:
    code, told = release("--rehearse", "--registry", "127.0.0.1:9/me", "--unsigned")
    assert code == 0, told
    assert git(repository, "tag") == ""
    assert not (tmp_path / "pushed").exists()
    dist = repository / "dist" / "0.3.0"
    made = {path.name for path in dist.iterdir() if path.name != ".steps"}
    assert made == {
        *("NOTES.md", "SHA256SUMS", "vulnerabilities.txt", "cog-triton-0.3.0.tgz"),
        *("cog_triton-0.3.0-py3-none-any.whl", "cog_triton-0.3.0.tar.gz"),
        *("cpu.spdx.json", "cpu.provenance.json"),
    }
    sums = dict(
        reversed(line.split("  ")) for line in (dist / "SHA256SUMS").read_text().splitlines()
    )
    assert sums.keys() == made - {"SHA256SUMS"}
    for name, digest in sums.items():
        assert hashlib.sha256((dist / name).read_bytes()).hexdigest() == digest
    assert "- More" in (dist / "NOTES.md").read_text()
    assert f"file://{dist}/nix-cache" in (tmp_path / "copied").read_text()
    assert "rehearsed" in told


def test_a_release_is_tagged_pushed_and_verified_once(
    release: Any, repository: Path, tmp_path: Path
) -> None:
    for name in ("private", "public"):
        (tmp_path / name).write_text("key")
    options = ("--registry", "127.0.0.1:9/me", "--key", str(tmp_path / "private"))
    options += ("--public-key", str(tmp_path / "public"), "--plain-http")
    (tmp_path / "pushed.broken").touch()
    code, told = release(*options)
    assert code == 1
    assert "[9/9] push cpu" in told
    assert git(repository, "cat-file", "-t", "v0.3.0") == "tag"
    assert "- More" in git(repository, "tag", "--list", "--format=%(contents)", "v0.3.0")
    (tmp_path / "pushed.broken").unlink()
    (tmp_path / "pushed").unlink()
    code, told = release(*options)  # goes on where it broke off
    assert code == 0, told
    assert "lint and quick tests: done before" in told
    assert (tmp_path / "tested").read_text() == "run\n"
    key, public = tmp_path / "private", tmp_path / "public"
    assert (tmp_path / "pushed").read_text().splitlines() == [
        f"push 127.0.0.1:9/me/cpu:0.3.0 --key {key} --dest-tls-verify=false",
        f"verify --key {public} --tls-verify=false 127.0.0.1:9/me/cpu:0.3.0",
    ]
    release(*options)
    assert len((tmp_path / "pushed").read_text().splitlines()) == 2


def test_images_of_an_earlier_run_are_not_summed_up(release: Any, repository: Path) -> None:
    assert release("--rehearse")[0] == 0
    assert release("--rehearse", "--without-nix")[0] == 0
    dist = repository / "dist" / "0.3.0"
    assert not [*dist.glob("cpu.*"), *dist.glob("nix-cache")]
    assert "cpu." not in (dist / "SHA256SUMS").read_text()


def test_without_a_registry_nothing_is_pushed(release: Any, tmp_path: Path) -> None:
    code, told = release()
    assert code == 0
    assert "git push REMOTE v0.3.0" in told
    assert not (tmp_path / "pushed").exists()


def test_another_commit_is_tested_anew(release: Any, repository: Path, tmp_path: Path) -> None:
    assert release("--rehearse")[0] == 0
    change(repository, "Makefile", MAKEFILE + "# more\n")
    assert release("--rehearse")[0] == 0
    assert (tmp_path / "tested").read_text() == "run\nrun\n"


def test_a_chart_that_lint_refuses_ends_it(release: Any, repository: Path) -> None:
    change(repository, "deploy/helm/examples/one.yaml", "wrong: [no image]\n")
    code, told = release()
    assert (code, "helm lint, one.yaml: ['no image']" in told) == (1, True)


def test_tests_that_fail_end_it(release: Any, repository: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    code, told = release()
    assert code == 1
    assert "test-quick: exit status 2" in told
    assert git(repository, "tag") == ""


@pytest.mark.parametrize(
    ("name", "old", "new", "reason"),
    [
        ("CHANGELOG.md", "## 0.3.0 - 2026-12-01", "## 0.4.0 - 2026-12-01", "no section 0.3.0"),
        ("CHANGELOG.md", " - 2026-12-01", "", 'CHANGELOG.md: "## 0.3.0" has no date'),
        ("CHANGELOG.md", "2026-12-01", "2026-13-01", "has no date"),
        ("CHANGELOG.md", "Unreleased\n", "Unreleased\n\n- Late\n", "lines under Unreleased"),
        ("CHANGELOG.md", "What a user gains:\n\n- More\n", "", "section 0.3.0 is empty"),
        ("deploy/helm/Chart.yaml", "version: 0.3.0", "version: 0.2.0", "Chart.yaml:2 (0.2.0)"),
        ("deploy/helm/Chart.yaml", '"0.3.0"', '"0.2.0"', "Chart.yaml:3 (0.2.0)"),
        ("cog_triton/__init__.py", "0.3.0", "0.2.0", "cog_triton/__init__.py:3 (0.2.0)"),
        ("README.md", "0.3.0", "0.2.0", "README.md:2 (0.2.0)"),
    ],
)
def test_texts_that_disagree_are_refused(
    release: Any, repository: Path, name: str, old: str, new: str, reason: str
) -> None:
    change(repository, name, (repository / name).read_text().replace(old, new))
    code, told = release("--rehearse")
    assert code == 2
    assert reason in told
    assert not (repository / "dist").exists()


def test_an_unclean_tree_and_wrong_versions_are_refused(release: Any, repository: Path) -> None:
    (repository / "new").touch()
    assert release("--rehearse")[0] == 2
    (repository / "new").unlink()
    for version in ("0.3", "v0.3.0", "0.03.0", "0.3.0rc1", "latest"):
        code, told = release("--rehearse", version=version)
        assert (code, f"VERSION={version}: must be X.Y.Z" in told) == (2, True)
    git(repository, "tag", "v0.10.0")
    code, told = release("--rehearse")
    assert code == 2
    assert "0.3.0 is not higher than 0.10.0" in told
    git(repository, "tag", "--delete", "v0.10.0")
    git(repository, "tag", "v0.3.0")
    change(repository, "Makefile", MAKEFILE + "# more\n")
    code, told = release("--rehearse")
    assert code == 2
    assert "a version that was released does not change" in told


def test_what_lacks_is_named(
    release: Any, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, told = release("--registry", "127.0.0.1:9/me")
    assert (code, "need a signature" in told) == (2, True)
    for option in ("--osv", "--cache-key", "--key", "--public-key"):
        code, told = release("--rehearse", option, "absent")
        assert (code, f"{option} absent: there is no such file" in told) == (2, True)
    code, told = release("--registry", "https://127.0.0.1:9/me", "--unsigned")
    assert (code, "must be [oci://]REGISTRY/REPOSITORY" in told) == (2, True)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    code, told = release("--rehearse")
    assert (code, "no Nix here" in told) == (2, True)
    code, told = release("--rehearse", "--without-nix")
    assert code == 0, told
    assert "no images, SBOMs, provenance or binary cache" in told
    assert not list((repository / "dist" / "0.3.0").glob("*.json"))


@pytest.mark.parametrize(("found", "option", "expected"), [
    ("1", [], 2), ("1", ["--without-vulnerabilities"], 2), ("2", [], 2),
    ("2", ["--without-vulnerabilities"], 0), ("0", [], 0),
])  # fmt: skip
def test_a_vulnerability_ends_it_and_one_says_that_none_was_looked_for(
    release: Any, repository: Path, monkeypatch: pytest.MonkeyPatch,
    found: str, option: list[str], expected: int,
) -> None:  # fmt: skip
    monkeypatch.setenv("FOUND", found)
    code, told = release(*option)
    assert code == expected, told
    assert bool(git(repository, "tag")) is (expected == 0)
    assert ("NOT LOOKED" in told) is (expected == 0 and found == "2")


def test_a_cut_writes_the_version_everywhere(release: Any, repository: Path) -> None:
    change(repository, "CHANGELOG.md", CHANGELOG.replace("Unreleased\n", "Unreleased\n\n- New\n"))
    assert release("--cut", version="0.4.0")[0] == 0
    today = datetime.date.today()
    log = (repository / "CHANGELOG.md").read_text()
    assert log.startswith(f"# Changelog\n\n## Unreleased\n\n## 0.4.0 - {today}\n\n- New\n")
    git(repository, "commit", "--quiet", "--all", "--message", "Cut 0.4.0")
    assert release("--rehearse", version="0.4.0")[0] == 0
    code, told = release("--cut", version="0.5.0")
    assert (code, "nothing under Unreleased" in told) == (2, True)
    code, told = release("--cut", version="0.3.9")
    assert (code, "0.3.9 is not higher than 0.4.0" in told) == (2, True)


def test_the_version_of_this_checkout_is_the_same_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    texts = runpy.run_path(str(SCRIPTS / "release_texts.py"))
    found = texts["written_versions"](ROOT)
    assert len(set(found.values())) == 1, found
    assert {name.partition(":")[0] for name in found} >= {
        *("cog_triton/__init__.py", "deploy/helm/Chart.yaml", "README.md"),
    }
    (version,) = set(found.values())
    titles = texts["sections"]((ROOT / "CHANGELOG.md").read_text("utf-8"))
    assert any(title.startswith(f"{version} - ") for title in titles)
