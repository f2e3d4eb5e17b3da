"""Scripts that need Nix: a user's keeps its binary cache, and only CI's is set up without."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = "sh bash dirname awk date sed xargs sort head cat grep chmod"
NIX = """#!/bin/sh
case "$*" in
  *'config show'*) echo "substituters = $CACHES" ;;
  *--out-link*) printf '#!/bin/sh\\n' >"$LINK"; chmod +x "$LINK" ;;
esac
"""


def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script with these variables and no CI."""
    inherited = {name: text for name, text in os.environ.items() if name != "CI"}
    return subprocess.run(
        [ROOT / "scripts" / script, *arguments],
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """PATH without Nix."""
    (tmp_path / "df").write_text("#!/bin/sh\necho head; echo /dev/x 1 1 99000000\n")
    (tmp_path / "df").chmod(0o755)
    for name in TOOLS.split():
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    return tmp_path


@pytest.mark.parametrize(
    ("caches", "warned"), [("https://cache.nixos.org/", False), ("", True)], ids=["cache", "none"]
)
def test_an_image_built_without_a_binary_cache_is_warned_of(
    caches: str, warned: bool, tools: Path, tmp_path: Path
) -> None:
    for name in ("nix", "nix-store", "python3"):
        (tools / name).write_text(NIX)
        (tools / name).chmod(0o755)
    link = str(tmp_path / "result")
    done = run("image-vllm", "90", link, PATH=str(tools), CACHES=caches, LINK=link)
    assert done.returncode == 0, done.stderr
    assert ("nixpkgs is compiled, for hours" in done.stderr) is warned


def test_scripts_without_nix_or_ci_are_refused_with_what_users_do(tools: Path) -> None:
    done = run("image-vllm", "90", PATH=str(tools))
    assert (done.returncode, "docs/images.md, Nix" in done.stderr) == (2, True), done.stderr
    done = run("ci-nix.sh", PATH=str(tools))
    assert (done.returncode, "docs/images.md" in done.stderr) == (1, True), done.stderr


def test_the_stand_in_of_nixpkgs_has_all_functions_that_are_called() -> None:
    called = {
        name
        for path in (ROOT / "nix").glob("*.nix")
        for name in re.findall(r"\blib\.(\w+)", path.read_text())
    }
    has = (ROOT / "tests" / "nix" / "standin" / "nixpkgs" / "lib.nix").read_text()
    assert {"concatStringsSep", "removePrefix"} <= called
    assert sorted(name for name in called if not re.search(rf"\b{name}\b", has)) == []
