"""NVIDIA's root file system unpacks under any Nix: one user, build users, sandbox or none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from factory import Factory

NGC = "(import SOURCE/nix/ngc.nix { inherit pkgs; python = pkgs.python312; })"
EXPORT = "crane export --platform linux/amd64 any -"
USERS = ["--option", "extra-experimental-features", "auto-allocate-uids"]
USERS += ["--option", "auto-allocate-uids", "true", "--option", "build-users-group", "nogroup"]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Factory:
    """The flake without its wheels."""
    return Factory(tmp_path_factory.mktemp("bare"), groups=())


def require_whole(root: Path) -> None:
    """Fail unless all that the store can hold of the look-alike is in `root`."""
    programs = ("su", "su.distrib", "wall", "ping", "python3.12")
    assert all(os.access(root / "usr" / "bin" / name, os.X_OK) for name in programs)
    assert (root / "usr" / "bin" / "su.distrib").read_text() == "setuid"
    assert (root / "usr" / "bin" / "away.2").readlink() == Path("/opt/not/here")
    assert (root / "etc" / "nobody-reads").read_text() == "mode 0"
    assert (root / "etc" / "private" / "key").read_text() == "key"
    assert (root / (root / "usr" / "share" / "long").readlink()).read_text() == "long"
    assert (root / "usr" / "share" / "ünïcode").read_text() == "name"
    assert not list((root / "dev").iterdir())
    assert not (root / "var" / "initctl").exists()
    assert {oct(path.lstat().st_mode & 0o7777) for path in root.rglob("*")} == {
        oct(mode) for mode in (0o444, 0o555, 0o777)
    }


@pytest.mark.parametrize("options", [[], USERS], ids=["one user", "build users"])
def test_root_file_system_unpacks(options: list[str], bare: Factory) -> None:
    built = bare.evaluated(f"{NGC}.rootfs")
    require_whole(built)
    assert bare.evaluated(f"{NGC}.rootfs", "--rebuild", *options) == built


def test_root_file_system_unpacks_in_a_sandbox(bare: Factory) -> None:
    # The look-alikes run this machine's bash, which no sandbox has: the tar is made outside of one.
    tar = bare.evaluated(
        f'pkgs.runCommand "tar" {{ nativeBuildInputs = [ pkgs.crane ]; }} "{EXPORT} >$out"'
    )
    script = (
        "import os, sys; sys.path.insert(0, os.environ['tool']); import pathlib, unpack_rootfs;"
        "os.path.exists('/etc/debian_version') and sys.exit('no sandbox');"
        f"unpack_rootfs.unpack(open('{tar}', 'rb'), pathlib.Path(os.environ['out']))"
    )
    derivation = (
        f'derivation {{ name = "sandboxed"; system = "{os.uname().machine}-linux";'
        f' builder = "${{pkgs.python312}}/bin/python3"; args = [ "-c" "{script}" ];'
        f" tar = builtins.storePath {tar}; PYTHONHOME = pkgs.python312;"
        ' tool = builtins.path { name = "tool"; path = SOURCE/nix;'
        ' filter = path: _: baseNameOf path == "unpack_rootfs.py"; }; }'
    )
    bare.evaluated("pkgs.python312")
    sandbox = ["--option", "sandbox", "true", "--option", "sandbox-paths", ""]
    sandbox += ["--option", "sandbox-fallback", "false"]
    require_whole(bare.evaluated(derivation, *sandbox))
