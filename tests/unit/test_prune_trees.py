"""Pruning of trees: their files, symbolic and hard links, and owners, in place and in a copy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fatbins import PTX, Image, container, elf, library
from prunable_files import LIBRARY, OLD_NS, SM90, actions, only, snapshot, write

from cog_triton.errors import DiskFull, InvalidArgument
from cog_triton_prune.command import run


def test_all_files_of_a_tree_are_pruned(tmp_path: Path) -> None:
    write(tmp_path / "lib" / "libtorch_cuda.so")
    write(tmp_path / "lib" / "libc10_cuda.so", library(container(Image(number=75))))
    write(tmp_path / "lib" / "libcublasLt.so.12")
    write(tmp_path / "lib" / "libmine.so")
    write(tmp_path / "lib" / "libtorch_cpu.so", elf([(".text", 1, 6, b"\xc3")]))
    write(tmp_path / "vllm" / "_C.abi3.so", library(container(Image(PTX, 80))))
    write(tmp_path / "vllm" / "data.so", b"no ELF")
    write(tmp_path / "vllm" / "broken.o", b"\x7fELF")
    write(tmp_path / "empty", b"")
    before = snapshot(tmp_path)
    result = run([tmp_path], SM90)
    assert actions(result) == {
        "libtorch_cuda.so": "pruned",
        "libc10_cuda.so": "unchanged",
        "libcublasLt.so.12": "skipped",
        "libmine.so": "skipped",
        "_C.abi3.so": "unchanged",
    }
    assert result.others == 4
    assert [outcome.path for outcome in result.outcomes] == sorted(
        outcome.path for outcome in result.outcomes
    )
    after = snapshot(tmp_path)
    assert {name for name in after if after[name] != before[name]} == {"lib/libtorch_cuda.so"}
    assert after.keys() == before.keys()


def test_links_are_kept_and_their_file_is_pruned_once(tmp_path: Path) -> None:
    real = write(tmp_path / "lib" / "libtorch.so.1.2")
    for name, aim in (("libtorch.so.1", "libtorch.so.1.2"), ("libtorch.so", "libtorch.so.1")):
        (real.parent / name).symlink_to(aim)
    (tmp_path / "lib2").symlink_to("lib")
    (tmp_path / "lost").symlink_to("nowhere")
    hard = tmp_path / "other" / "libtorch_too.so"
    hard.parent.mkdir()
    hard.hardlink_to(real)
    before = snapshot(tmp_path)
    outcome = only(run([tmp_path, tmp_path / "lib" / "libtorch.so", tmp_path / "lib2"], SM90))
    assert (outcome.action, outcome.path, outcome.reason) == ("pruned", real, "")
    assert hard.samefile(real)
    after = snapshot(tmp_path)
    assert {name: facts[1:] for name, facts in after.items()} == {
        name: facts[1:] for name, facts in before.items()
    }
    assert after["lib/libtorch.so.1.2"][0] != LIBRARY


def test_a_link_given_as_a_path_is_followed(tmp_path: Path) -> None:
    real = write(tmp_path / "libtorch.so.1")
    link = tmp_path / "libtorch.so"
    link.symlink_to(real)
    assert only(run([link], SM90)).path == real
    assert link.is_symlink()


def test_files_outside_the_tree_are_not_changed(tmp_path: Path) -> None:
    outside = write(tmp_path / "cache" / "libtorch_cuda.so")
    hard = tmp_path / "tree" / "libtorch_cuda.so"
    hard.parent.mkdir()
    hard.hardlink_to(outside)
    linked = write(tmp_path / "cache" / "libtorch_more.so")
    (hard.parent / linked.name).symlink_to(linked)
    result = run([tmp_path / "tree"], SM90)
    assert only(result).reason == "1 other hard links keep the file as it was"
    assert result.links_out == 1
    assert outside.read_bytes() == linked.read_bytes() == LIBRARY
    assert hard.read_bytes() != LIBRARY


def test_output_copies_and_prunes_a_tree(tmp_path: Path) -> None:
    source = tmp_path / "site"
    real = write(source / "torch" / "lib" / "libtorch_cuda.so.1", mode=0o555)
    (real.parent / "libtorch_cuda.so").symlink_to(real.name)
    (source / "hard.so").hardlink_to(real)
    write(source / "torch" / "__init__.py", b"pass", 0o640)
    (source / "empty").mkdir(mode=0o700)
    for directory in (real.parent, source / "torch", source / "empty", source):
        os.utime(directory, ns=(OLD_NS, OLD_NS))
    before = snapshot(tmp_path)
    result = run([source], SM90, output=tmp_path / "out")
    assert only(result).action == "pruned"
    assert snapshot(source) == {
        name.removeprefix("site/"): facts for name, facts in before.items() if name != "site"
    }
    copy = snapshot(tmp_path / "out" / "site")
    original = snapshot(source)
    assert {name: facts[1:] for name, facts in copy.items()} == {
        name: facts[1:] for name, facts in original.items()
    }
    changed = {name for name, facts in copy.items() if facts[0] != original[name][0]}
    assert changed == {"torch/lib/libtorch_cuda.so.1", "hard.so"}
    assert (tmp_path / "out" / "site").stat().st_mtime_ns == OLD_NS


def test_output_of_several_paths(tmp_path: Path) -> None:
    one, two = write(tmp_path / "a" / "libtorch_a.so"), write(tmp_path / "b" / "libtorch_b.so")
    run([one, two.parent], SM90, output=tmp_path / "new" / "out")
    assert sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "new").rglob("*.so")) == [
        "new/out/b/libtorch_b.so",
        "new/out/libtorch_a.so",
    ]


@pytest.mark.parametrize("output", ["a", "a/new", "."])
def test_invalid_outputs_are_refused(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a" / "libtorch_a.so")
    write(tmp_path / "a" / "a" / "b")
    before = snapshot(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match="OUTPUT="):
        run([Path("a")], SM90, output=Path(output))
    assert snapshot(tmp_path) == before


def test_two_paths_of_one_name_cannot_share_an_output(tmp_path: Path) -> None:
    paths = [write(tmp_path / side / "libtorch.so") for side in "ab"]
    with pytest.raises(InvalidArgument, match="meant twice"):
        run(paths, SM90, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("why", "error"),
    [("No space left on device", DiskFull), ("Permission denied", InvalidArgument)],
)
def test_a_tree_that_cannot_be_copied_leaves_nothing(
    why: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "site" / "libtorch.so").parent
    stand_in = write(tmp_path / "bin" / "cp", b"")
    stand_in.write_text(f'#!/bin/sh\nmkdir "$4"\necho "cp: error: {why}" >&2\nexit 1\n')
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
    with pytest.raises(error, match=f"PATH='{source}': cp: error: {why}"):
        run([source], SM90, output=tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("copy", [False, True])
def test_owners_and_special_permissions_are_kept(copy: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "site" / "libtorch.so")
    os.chown(path, 1234, 2345)
    path.chmod(0o6751)
    os.chown(path.parent, 1234, 2345)
    run([path.parent], SM90, output=tmp_path / "out" if copy else None)
    made = tmp_path / "out" / "site" / path.name if copy else path
    assert made.read_bytes() != LIBRARY
    status = made.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (1234, 2345, 0o6751)
    assert made.parent.stat().st_uid == 1234
