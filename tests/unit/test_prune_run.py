"""Pruning real files: atomic replacement, links and metadata, copied trees, interrupts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fatbins import PTX, Image, container, cubin, elf, library

from cog_triton.errors import DiskFull, FatbinInvalid, InvalidArgument
from cog_triton_prune import licences, prune_file
from cog_triton_prune.command import Result, run
from cog_triton_prune.prune_file import Options, Outcome

FATBIN = container(*(Image(number=number) for number in (80, 86, 90))) * 3
LIBRARY = library(FATBIN, cubin(80) + cubin(90))
FREED = 3 * 2 * len(Image().pack())
OLD_NS = 1_500_000_000_123_456_789
SM90 = Options((90,))


def write(path: Path, data: bytes = LIBRARY, mode: int = 0o750) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)
    os.utime(path, ns=(OLD_NS, OLD_NS))
    return path


def actions(result: Result) -> dict[str, str]:
    return {outcome.path.name: outcome.action for outcome in result.outcomes}


def snapshot(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything below `root`: kind or content, mode, time and number of links."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        content: object = "directory"
        if path.is_symlink():
            content = path.readlink()
        elif path.is_file():
            content = path.read_bytes()
        facts = (status.st_mode, status.st_mtime_ns, status.st_nlink)
        found[str(path.relative_to(root))] = (content, *facts)
    return found


def only(result: Result) -> Outcome:
    (outcome,) = result.outcomes
    return outcome


def test_files_are_pruned_in_place(tmp_path: Path) -> None:
    path = write(tmp_path / "libtorch_cuda.so")
    os.utime(tmp_path, ns=(OLD_NS, OLD_NS))
    outcome = only(run([path], SM90))
    assert (outcome.action, outcome.plan.freed, outcome.reason) == ("pruned", FREED, "")
    status = path.stat()
    assert (status.st_mode & 0o7777, status.st_mtime_ns) == (0o750, OLD_NS)
    assert tmp_path.stat().st_mtime_ns == OLD_NS
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    data = path.read_bytes()
    assert len(data) == len(LIBRARY)
    assert data.count(cubin(90)) == 4
    assert data.count(cubin(80)) == 1


def test_a_second_run_replaces_no_file(tmp_path: Path) -> None:
    path = write(tmp_path / "libtorch_cuda.so")
    run([path], SM90)
    before = (path.read_bytes(), path.stat())
    assert only(run([path], SM90)).action == "unchanged"
    assert (path.read_bytes(), path.stat()) == before


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    write(tmp_path / "a" / "libtorch_cuda.so")
    before = snapshot(tmp_path)
    options = Options((90,), dry_run=True, measure=True, embedded=True)
    outcome = only(run([tmp_path / "a"], options, output=tmp_path / "out"))
    assert (outcome.action, outcome.plan.freed) == ("pruned", FREED + len(cubin(80)))
    assert outcome.gzip is not None
    assert 0 < outcome.gzip[1] < outcome.gzip[0]
    assert snapshot(tmp_path) == before


def test_embedded_cubins_only_when_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "libtensorrt_llm.so")
    assert only(run([path], Options((90,), embedded=True))).plan.zeroed == {"sm_80": len(cubin(80))}
    assert cubin(80) not in path.read_bytes()


def test_measure_reports_sizes_under_gzip(tmp_path: Path) -> None:
    path = write(tmp_path / "libtorch_cuda.so")

    def gzip() -> int:
        command = ["gzip", "-1", "-n", "-c", path]
        return len(subprocess.run(command, check=True, capture_output=True).stdout)

    before = gzip()
    outcome = only(run([path], Options((90,), measure=True)))
    assert outcome.gzip is not None
    for told, real in zip(outcome.gzip, (before, gzip()), strict=True):
        assert told == pytest.approx(real, rel=0.05)


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


def test_all_licences_prunes_closed_libraries(tmp_path: Path) -> None:
    path = write(tmp_path / "libcublasLt.so.12")
    assert only(run([path], SM90)).reason == "under NVIDIA's licence"
    assert path.read_bytes() == LIBRARY
    assert only(run([path], Options((90,), all_licences=True))).action == "pruned"


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("torch/lib/libtorch_cuda.so", True),
        ("torch/lib/libtorch_cuda_linalg.so", True),
        ("torch/lib/libc10_cuda.so", True),
        ("torch/lib/libtorch_nvshmem.so", False),
        ("tensorrt_llm/libs/libtensorrt_llm.so", True),
        ("tensorrt_llm/libs/libtensorrt_llm_nvrtc_wrapper.so", False),
        ("tensorrt_llm/libs/libnvinfer_plugin_tensorrt_llm.so.10", True),
        ("vllm/_C_stable_libtorch.abi3.so", True),
        ("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", True),
        ("vllm/third_party/deep_gemm/_C.cpython-312-x86_64-linux-gnu.so", True),
        ("flash_attn_2_cuda.cpython-312-x86_64-linux-gnu.so", True),
        ("transformer_engine/libtransformer_engine.so", True),
        ("amp_C.cpython-312-x86_64-linux-gnu.so", True),
        ("torchvision/_C.so", True),
        ("nvidia/cublas/lib/libcublasLt.so.13", False),
        ("nvidia/cudnn/lib/libcudnn_ops.so.9", False),
        ("libnvinfer.so.10", False),
        ("nvidia/nccl/lib/libnccl.so.2", True),
        ("vllm/nvidia/libcublas.so", False),
        ("vllm/libcublas.so", False),
        ("libfoo.so", False),
    ],
)
def test_which_licences_allow_pruning(path: str, allowed: bool) -> None:
    assert (licences.refusal(Path("/usr/lib/python3/dist-packages") / path) is None) is allowed


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


def test_a_tree_that_cannot_be_copied_leaves_nothing(tmp_path: Path) -> None:
    source = write(tmp_path / "site" / "libtorch.so").parent
    os.mkfifo(source / "pipe")
    with pytest.raises(InvalidArgument, match="is a device, pipe or socket"):
        run([source], SM90, output=tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"text", b"\x7fELF\1\1", None])
def test_a_file_without_elf_header_is_ignored(content: bytes | None, tmp_path: Path) -> None:
    good, bad = write(tmp_path / "libtorch.so"), tmp_path / "bad"
    if content is not None:
        bad.write_bytes(content)
    with pytest.raises(InvalidArgument, match=f"PATH='{bad}'"):
        run([good, bad], SM90)
    assert good.read_bytes() == LIBRARY


def test_an_unknown_layout_is_refused_and_other_files_are_pruned(tmp_path: Path) -> None:
    bad = write(tmp_path / "libtorch_bad.so", library(FATBIN + b"garbage!"))
    good = write(tmp_path / "libtorch_good.so")
    write(tmp_path / "libclosed.so", bad.read_bytes())
    before = snapshot(tmp_path)
    result = run([tmp_path], SM90)
    assert actions(result) == {
        "libtorch_bad.so": "refused",
        "libtorch_good.so": "pruned",
        "libclosed.so": "skipped",
    }
    (refused,) = [outcome for outcome in result.outcomes if outcome.error]
    assert isinstance(refused.error, FatbinInvalid)
    assert refused.reason.startswith(f"E1307 FatbinInvalid: {bad}: byte ")
    after = snapshot(tmp_path)
    assert {name for name in after if after[name] != before[name]} == {good.name}


def test_pruning_for_another_gpu_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "libtorch.so")
    run([path], SM90)
    before = path.read_bytes()
    refused = only(run([path], Options((86,))))
    assert f"{path}: SM='86': it was pruned before and has only sm_90" in refused.reason
    assert path.read_bytes() == before


def fails(error: OSError) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("step", ["shutil.copyfile", "os.fsync", "shutil.copystat", "os.link"])
def test_a_failure_leaves_the_files_as_they_were(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "libtorch.so")
    (tmp_path / "libtorch_too.so").hardlink_to(path)
    before = snapshot(tmp_path)
    monkeypatch.setattr(f"cog_triton_prune.prune_file.{step}", fails(OSError(28, "No space left")))
    refused = only(run([path, tmp_path], SM90))
    assert isinstance(refused.error, DiskFull)
    assert refused.reason == f"E2302 DiskFull: PATH='{path}': No space left"
    assert snapshot(tmp_path) == before


def test_a_skipped_file_need_not_be_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "key.pem")
    write(tmp_path / "libtorch.so")
    monkeypatch.setattr("cog_triton_prune.prune_file.mmap.mmap", fails(PermissionError(13, "no")))
    result = run([tmp_path], SM90)
    assert actions(result) == {"libtorch.so": "refused"}
    assert result.others == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do all of this")
def test_files_that_may_not_be_read_or_replaced(tmp_path: Path) -> None:
    write(tmp_path / "a" / "libtorch_secret.so", mode=0)
    fixed = write(tmp_path / "b" / "libtorch_fixed.so")
    fixed.parent.chmod(0o555)
    write(tmp_path / "c" / "key.pem", b"secret", mode=0)
    result = run([tmp_path], SM90)
    fixed.parent.chmod(0o755)
    assert result.others == 1
    assert {outcome.reason.partition(":")[0] for outcome in result.outcomes} == {
        "E1005 InvalidArgument"
    }
    assert actions(result) == {"libtorch_secret.so": "refused", "libtorch_fixed.so": "refused"}
    assert fixed.read_bytes() == LIBRARY


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


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    path = write(Path(os.fsdecode(os.fsencode(tmp_path) + b"/libtorch_\xff.so")), LIBRARY + b"")
    assert only(run([tmp_path], SM90)).action == "pruned"
    assert "\ufffd" in prune_file.shown(path)


def test_many_files_in_parallel(tmp_path: Path) -> None:
    for number in range(40):
        write(tmp_path / f"libtorch_{number}.so")
    told: list[tuple[int, int]] = []
    result = run([tmp_path], SM90, jobs=8, progress=lambda done, of: told.append((done, of)))
    assert set(actions(result).values()) == {"pruned"}
    assert told == [(done, 40) for done in range(1, 41)]
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_an_interrupt_ends_it_between_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        write(tmp_path / f"libtorch_{number:02}.so")

    def interrupt(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([tmp_path], SM90, jobs=1, progress=interrupt)
    contents = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(contents) == 30
    assert len(set(contents.values())) == 2
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        run([tmp_path], SM90, output=tmp_path.parent / "out", progress=interrupt)
    assert threading.active_count() == before
    assert list((tmp_path.parent / "out").iterdir()) == []


SLOW = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from cog_triton_prune import command, prune_file
real = prune_file.zero_edits.apply
def slow(view, edits):
    print("applying", flush=True)
    __import__("time").sleep(0.5)
    real(view, edits)
prune_file.zero_edits.apply = slow
command.run([Path(sys.argv[1])], prune_file.Options((90,)), jobs=2)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_leave_whole_files_and_no_temporary_ones(number: int, tmp_path: Path) -> None:
    for index in range(12):
        write(tmp_path / f"libtorch_{index}.so")
    names = {path.name for path in tmp_path.iterdir()}
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.1)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGINT, 128 + signal.SIGTERM)
    assert {path.name for path in tmp_path.iterdir()} == names
    contents = [path.read_bytes() for path in tmp_path.iterdir()]
    assert 1 <= contents.count(LIBRARY) < 12
    assert len(set(contents)) == 2
