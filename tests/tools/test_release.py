"""scripts/release: what is refused, and what is made of a small repository."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHANGELOG = (
    "# Changelog\n\n## Unreleased\n\n## 0.3.0 - 2026-12-01\n\n- More\n\n## 0.2.0 - x\n\n- Old\n"
)
FILES = {
    "CHANGELOG.md": CHANGELOG,
    "Makefile": "test-quick:\n\t@test ! -e ../broken\n",
    ".gitignore": "/dist/\n/.work/\n/.venv/\n",
    "README.md": "$ make serve\ncog-triton 0.3.0: starting; the first\n",
    "cog_triton/__init__.py": '"""x"""\n\n__version__ = "0.3.0"\n',
    "deploy/helm/Chart.yaml": 'apiVersion: v2\nversion: 0.3.0\nappVersion: "0.3.0" # its\n',
    "scripts/setup-tools": "#!/bin/sh\n",
    ".work/tools/helm_python.py": """
import pathlib
class chart:
    @staticmethod
    def package(path, destination):
        pathlib.Path(destination, "cog-triton-0.3.0.tgz").write_text("chart")
""",
    # As hatchling does it.
    ".venv/lib/hatchling/__main__.py": """
import pathlib, sys
place = pathlib.Path(sys.argv[sys.argv.index("-d") + 1])
(place / "cog_triton-0.3.0-py3-none-any.whl").write_text("wheel")
""",
    # Nix, and the image that it builds, which writes down what it is asked.
    ".venv/bin/nix": """#!/bin/sh
case "$*" in
  *" eval "*) echo '["default","cpu"]' ;;
  *" build "*) while [ "$1" != --out-link ]; do shift; done; cp .venv/bin/image "$2" ;;
esac
""",
    ".venv/bin/image": """#!/bin/sh
case $1 in sbom | provenance) echo '{}' ;; *) echo "$@" >>.work/pushed ;; esac
""",
}
Run = Callable[..., tuple[int, str]]


def git(repository: Path, *arguments: str) -> str:
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("GIT_DIR", "GIT_WORK_TREE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "test")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "test@localhost")
    root = tmp_path / "repository"
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    shutil.copy(ROOT / "scripts" / "release", root / "scripts" / "release")
    monkeypatch.setenv("PYTHONPATH", str(root / ".venv" / "lib"))
    git(tmp_path, "init", "--quiet", "--initial-branch=main", str(root))
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "Begin")
    return root


@pytest.fixture
def release(repository: Path) -> Run:
    """Runs the script on the repository: the exit status and what it says."""

    def run(*arguments: str, version: str = "0.3.0", **variables: str) -> tuple[int, str]:
        command = [repository / "scripts" / "release", version, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
        return done.returncode, done.stdout + done.stderr

    return run


def change(repository: Path, name: str, text: str) -> None:
    (repository / name).write_text(text)
    git(repository, "commit", "--quiet", "--all", "--message", "Change")


def test_a_rehearsal_makes_everything_but_a_tag_and_a_push(release: Run, repository: Path) -> None:
    code, said = release("--rehearse")
    assert code == 0, said
    assert git(repository, "tag") == ""
    dist = repository / "dist" / "0.3.0"
    made = {path.name for path in dist.iterdir() if path.is_file()}
    assert made == {
        *("NOTES.md", "SHA256SUMS", "cog-triton-0.3.0.tgz", "cog_triton-0.3.0-py3-none-any.whl"),
        *("cpu.spdx.json", "cpu.provenance.json"),
    }
    sums = [line.split("  ") for line in (dist / "SHA256SUMS").read_text().splitlines()]
    assert {name for _, name in sums} == made - {"SHA256SUMS"}
    for digest, name in sums:
        assert hashlib.sha256((dist / name).read_bytes()).hexdigest() == digest
    assert (dist / "NOTES.md").read_text() == "# cog-triton 0.3.0\n\n\n- More\n"
    assert "NOT LOOKED for known vulnerabilities" in said


def test_a_release_is_tagged_and_pushed(release: Run, repository: Path, tmp_path: Path) -> None:
    (tmp_path / "key").touch()
    registry = {"REGISTRY": "127.0.0.1:9/me", "KEY": str(tmp_path / "key")}
    code, said = release(**registry)
    assert code == 0, said
    assert "- More" in git(repository, "tag", "--list", "--format=%(contents)", "v0.3.0")
    pushed = (repository / ".work" / "pushed").read_text()
    assert pushed == f"push 127.0.0.1:9/me/cpu:0.3.0 --key {registry['KEY']}\n"
    assert release(IMAGES="none")[0] == 0, "it can be repeated"
    assert not list((repository / "dist" / "0.3.0").glob("cpu.*"))


@pytest.mark.parametrize(
    ("name", "old", "new", "reason"),
    [
        ("CHANGELOG.md", "## 0.3.0 - 2026-12-01", "## 0.4.0 - 2026-12-01", "no dated section"),
        ("CHANGELOG.md", " - 2026-12-01", "", "no dated section 0.3.0"),
        ("CHANGELOG.md", "Unreleased\n", "Unreleased\n\n- Late\n", "lines under Unreleased"),
        ("CHANGELOG.md", "- More\n", "", "an empty one"),
        ("deploy/helm/Chart.yaml", "version: 0.3.0", "version: 0.2.0", "files have"),
        ("deploy/helm/Chart.yaml", '"0.3.0"', '"0.2.0"', "files have"),
        ("cog_triton/__init__.py", "0.3.0", "0.2.0", "files have"),
        ("README.md", "0.3.0", "0.2.0", "files have"),
    ],
)
def test_texts_that_disagree_are_refused(
    release: Run, repository: Path, name: str, old: str, new: str, reason: str
) -> None:
    change(repository, name, (repository / name).read_text().replace(old, new))
    code, said = release("--rehearse")
    assert (code, reason in said) == (2, True), said
    assert not (repository / "dist").exists()


def test_failed_tests_an_unclean_tree_wrong_versions_and_missing_keys_are_refused(
    release: Run, repository: Path
) -> None:
    (repository.parent / "broken").touch()
    assert release()[0] != 0, "its tests fail"
    (repository.parent / "broken").unlink()
    assert git(repository, "tag") == ""
    assert release(REGISTRY="127.0.0.1:9/me")[0] == 2
    assert release(OSV="absent")[0] == 2
    for version in ("0.3", "v0.3.0", "0.03.0", "0.3.0rc1", "latest"):
        code, said = release("--rehearse", version=version)
        assert (code, f"VERSION={version}: must be X.Y.Z" in said) == (2, True)
    (repository / "new").touch()
    assert "not clean" in release("--rehearse")[1]
    (repository / "new").unlink()
    git(repository, "tag", "v0.10.0")
    assert "0.3.0 is not above 0.10.0" in release("--rehearse")[1]
    git(repository, "tag", "--delete", "v0.10.0")
    git(repository, "tag", "v0.3.0")
    change(repository, "Makefile", FILES["Makefile"] + "# more\n")
    assert "the tag of another commit" in release("--rehearse")[1]


def test_a_cut_writes_the_version_everywhere(release: Run, repository: Path) -> None:
    change(repository, "CHANGELOG.md", CHANGELOG.replace("Unreleased\n", "Unreleased\n\n- New\n"))
    assert release("--cut", version="0.4.0")[0] == 0
    log = (repository / "CHANGELOG.md").read_text()
    assert re.match(r"# Changelog\n\n## Unreleased\n\n## 0.4.0 - \d{4}-\d\d-\d\d\n\n- New\n", log)
    git(repository, "commit", "--quiet", "--all", "--message", "Cut 0.4.0")
    code, said = release("--rehearse", version="0.4.0")
    assert code == 0, said
