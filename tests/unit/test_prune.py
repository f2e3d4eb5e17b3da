"""``cog-triton prune``: files and trees, licences, refusals, interrupts, table and JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import ran
from fatbins import PTX, Image, container, cubin, elf, library
from prunable_files import FATBIN, FREED, LIBRARY, OLD_NS, SM90, actions, only, snapshot, write

from cog_triton.errors import DiskFull, FatbinInvalid, InvalidArgument
from cog_triton_prune import licences
from cog_triton_prune.command import run
from cog_triton_prune.prune_file import Options


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
    assert only(run([path], SM90)).action == "unchanged"
    assert (path.read_bytes(), path.stat().st_ino) == (data, status.st_ino)


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    write(tmp_path / "a" / "libtorch_cuda.so")
    before = snapshot(tmp_path)
    options = Options((90,), dry_run=True, embedded=True)
    outcome = only(run([tmp_path / "a"], options, output=tmp_path / "out"))
    assert (outcome.action, outcome.plan.freed) == ("pruned", FREED + len(cubin(80)))
    assert snapshot(tmp_path) == before


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


MANY = [Image(number=n) for n in (75, 80, 86, 89, 90, 100, 103, 120, 121)] + [
    *(Image(number=n, variant="a") for n in (90, 100, 103, 120)),
    *(Image(number=n, variant="f") for n in (100, 120)),
    *(Image(PTX, n) for n in (80, 90, 120)),
]
MANY_GPUS = container(*MANY) + container(Image(number=75))
RODATA = cubin(80) + cubin(90)
LONG = "libtensorrt_llm_kernels_with_a_name_that_is_longer_than_a_line_of_the_table.so"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, data in {
        "torch/lib/libtorch_cuda.so": library(MANY_GPUS),
        f"tensorrt_llm/libs/{LONG}": library(MANY_GPUS, RODATA),
        "nvidia/libcublasLt.so.13": library(MANY_GPUS),
        "vllm/_C.abi3.so": library(container(Image(number=90))),
        "vllm/[red]x:bug:.py": b"",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path


def prune(*arguments: str | Path) -> tuple[int, str, str]:
    result = ran("prune", *arguments)
    return result.exit_code, result.stdout, result.stderr


def test_json_has_all_results(tree: Path) -> None:
    code, text, errors = prune("--sm", "sm_90", "--json", tree)
    assert (code, errors) == (0, "")
    told: dict[str, Any] = json.loads(text)
    assert (told["sm"], told["dry_run"], told["files_without_device_code"]) == (90, False, 1)
    rows = {Path(row["path"]).name: row for row in told["files"]}
    row = rows["libtorch_cuda.so"]
    assert row["action"] == "pruned"
    assert set(row["kept"]) == {"sm_75", "sm_90", "sm_90a"}
    assert row["freed"] == sum(row["found"].values()) - sum(row["kept"].values())
    assert (row["fat_binaries"], row["fat_binaries_without_code"]) == (2, 1)
    assert told["freed"] == 2 * row["freed"]
    assert rows[LONG]["embedded"].keys() == {"sm_80", "sm_90"}
    assert rows["libcublasLt.so.13"]["reason"] == "under NVIDIA's licence"


def test_a_refused_file_is_an_error_and_exit_code_1(tree: Path) -> None:
    bad = tree / "torch" / "lib" / "libtorch_[bold]bad.so"
    bad.write_bytes(library(MANY_GPUS + b"garbage!"))
    code, table, errors = prune("--sm", "86", tree)
    assert code == 1
    assert "refused: E1307" in table
    assert "libtorch_[bold]bad.so" in table
    assert errors.startswith(f"error: E1307 FatbinInvalid: {bad}: byte ")
    assert len(errors.splitlines()) == 1
    assert "2 pruned, 1 unchanged, 1 skipped, 1 refused" in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sm", "A10", "."], "E1005 InvalidArgument: SM='A10'"),
        (["--sm", "90a", "."], "for this GPU say 90"),
        (["--sm", "86", "/no/such/place"], "PATH='/no/such/place': No such file"),
        (["--sm", "86", __file__], "must be a directory, or a 64-bit"),
    ],
)
def test_invalid_arguments_are_refused_with_a_code(arguments: list[str], message: str) -> None:
    code, out, errors = prune(*arguments)
    assert (code, out) == (1, "")
    assert errors.startswith("error: E1005 ")
    assert message in errors
