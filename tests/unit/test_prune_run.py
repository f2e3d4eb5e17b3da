"""Pruning real files: atomic replacement, metadata, licences, refusals, interrupts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from fatbins import cubin, library
from prunable_files import FATBIN, FREED, LIBRARY, OLD_NS, SM90, actions, only, snapshot, write

from cog_triton.errors import DiskFull, FatbinInvalid, InvalidArgument
from cog_triton_prune import licences, prune_file
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


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    path = write(Path(os.fsdecode(os.fsencode(tmp_path) + b"/libtorch_\xff.so")), LIBRARY + b"")
    assert only(run([tmp_path], SM90)).action == "pruned"
    assert "\ufffd" in prune_file.shown(path)


def test_many_files_in_parallel(tmp_path: Path) -> None:
    for number in range(40):
        write(tmp_path / f"libtorch_{number}.so")
    result = run([tmp_path], SM90, jobs=8)
    assert set(actions(result).values()) == {"pruned"}
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_an_interrupt_ends_it_between_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        write(tmp_path / f"libtorch_{number:02}.so")

    def interrupted(futures: Iterable[object], *_: object, **__: object) -> Iterator[object]:
        yield next(iter(futures))
        raise KeyboardInterrupt

    monkeypatch.setattr("cog_triton_prune.command.track", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run([tmp_path], SM90, jobs=1)
    contents = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(contents) == 30
    assert len(set(contents.values())) == 2
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        run([tmp_path], SM90, output=tmp_path.parent / "out")
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
