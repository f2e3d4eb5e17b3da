"""nix/split_rootfs.py: which part of an image a path of NGC's root file system goes to, if any."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

NIX = Path(__file__).parents[2] / "nix"
TABLE = json.loads((NIX / "ngc-parts.json").read_text())
VENV = "opt/venv-tritonserver/lib/python3.12/site-packages"
DIST = "usr/local/lib/python3.12/dist-packages"


def load(name: str) -> ModuleType:
    """A program of nix/ as a module."""
    spec = importlib.util.spec_from_file_location(f"nix_{name}", NIX / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


split_rootfs = load("split_rootfs")
EXPORT = NIX.parent / "tests" / "nix" / "standin" / "nixpkgs" / "crane_export.py"


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("a", ["a"]),
        ("{a,b}/c", ["a/c", "b/c"]),
        ("x{,_y}", ["x", "x_y"]),
        ("{a,b{c,d}}e", ["ae", "bce", "bde"]),
    ],
)
def test_alternatives_of_a_pattern_are_expanded(pattern: str, texts: list[str]) -> None:
    assert sorted(split_rootfs.expand(pattern)) == sorted(texts)


@pytest.mark.parametrize(
    ("pattern", "path", "belongs"),
    [
        ("usr/local/cuda*", "usr/local/cuda-13.1/lib64/libcublas.so", True),
        ("usr/local/cuda*", "usr/local/lib/cuda", False),
        ("usr/include", "usr/include", True),
        ("usr/include", "usr/include2", False),
        ("**/x.so", "x.so", True),
        ("**/x.so", "a/b/x.so", True),
        ("**/x.so", "a/b/ax.so", False),
        ("a/*.a", "a/b/c.a", False),
        ("a/**/*.a", "a/b/c.a", True),
        ("lib+", "lib+", True),
        ("lib+", "libb", False),
    ],
)
def test_patterns_match_a_path_and_all_below_it(pattern: str, path: str, belongs: bool) -> None:
    assert (path in split_rootfs.Patterns([pattern])) == belongs


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("opt/tritonserver/bin/tritonserver", "triton"),
        ("opt/tritonserver/backends/tensorrtllm/libtriton_tensorrtllm.so", "triton"),
        ("usr/local/TensorRT-10.14.1.48/lib/libnvinfer.so.10", "tensorrt"),
        (f"{VENV}/tensorrt/tensorrt.so", "tensorrt"),
        (f"{VENV}/tensorrt_llm/libs/libtensorrt_llm.so", "tensorrt_llm"),
        (f"{DIST}/tensorrt_llm/libs/libtensorrt_llm.so", "tensorrt_llm"),
        (f"{VENV}/tensorrt_llm-1.2.1.dist-info/METADATA", "tensorrt_llm"),
        ("app/all_models/README.md", "tensorrt_llm"),
        (f"{VENV}/torch/lib/libtorch_cuda.so", "torch"),
        (f"{VENV}/triton/_C/libtriton.so", "torch"),
        (f"{VENV}/transformer_engine/libtransformer_engine.so", "torch"),
        (f"{VENV}/amp_C.cpython-312-x86_64-linux-gnu.so", "torch"),
        (f"{VENV}/transformers/__init__.py", "python"),
        ("usr/local/cuda-13.1/lib64/libcublasLt.so.13", "cuda"),
        ("usr/lib/x86_64-linux-gnu/libcudnn.so.9", "cuda"),
        ("usr/bin/bash", "os"),
        ("bin", "os"),
    ],
)
def test_each_path_goes_to_one_part(path: str, part: str) -> None:
    assert split_rootfs.PartTable(TABLE, "runner").part_of(path) == part


RESOURCE = "usr/local/TensorRT-10.14.1.48/lib/libnvinfer_builder_resource_{}.so.10.14.1"


@pytest.mark.parametrize(
    ("path", "runner", "builder"),
    [
        (RESOURCE.format("sm86"), True, False),
        (RESOURCE.format("sm90"), True, True),
        (RESOURCE.format("ptx"), True, False),
        ("usr/include/stdio.h", True, False),
        ("usr/lib/x86_64-linux-gnu/libc.a", True, True),
        ("usr/share/doc/bash/README", True, True),
        ("usr/share/doc/bash/copyright", False, False),
        ("usr/local/cuda-13.1/EULA.txt", False, False),
        (f"{VENV}/torch-2.10.dist-info/METADATA", False, False),
        (f"{VENV}/torch/include/LICENSE", False, False),
        (f"{VENV}/torch/lib/libtorch_cuda.so", False, False),
        ("app/examples/models/core/llama/convert_checkpoint.py", True, False),
        ("root/.cache/pip/x", True, True),
        ("usr/local/TensorRT-10.14.1.48/doc/Acknowledgements.txt", False, False),
        ("usr/local/TensorRT-10.14.1.48/doc/index.html", True, True),
        (f"{VENV}/torch/include/torch.h", True, False),
        (f"{VENV}/tensorrt_llm/include/fp8_gemm.cuh", False, False),
        (f"{VENV}/triton/backends/nvidia/include/cuda.h", False, False),
    ],
)
def test_paths_that_runner_and_builder_drop(path: str, runner: bool, builder: bool) -> None:
    assert split_rootfs.PartTable(TABLE, "runner").is_dropped(path) == runner
    assert split_rootfs.PartTable(TABLE, "builder", "86").is_dropped(path) == builder


def test_a_builder_for_every_architecture_keeps_its_resources() -> None:
    everything = split_rootfs.PartTable(TABLE, "builder")
    assert not any(everything.is_dropped(RESOURCE.format(sm)) for sm in ("sm80", "sm90", "ptx"))


def test_the_parts_list_every_path_once_after_its_parents(tmp_path: Path) -> None:
    paths = ["usr/bin/bash", "opt/tritonserver/bin/t", f"{VENV}/torch/a", "usr/local/cuda-13/b"]
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    (tmp_path / "bin").symlink_to("usr/bin")
    (tmp_path / "srv").mkdir()
    found: dict[str, list[str]] = {}
    for part in TABLE["parts"]:
        command = [sys.executable, NIX / "split_rootfs.py", NIX / "ngc-parts.json", tmp_path]
        output = subprocess.check_output([*command, part["name"], "runner"], text=True)
        listed = output.split("\0")[:-1]
        for path in listed:
            parent = str(Path(path).parent)
            assert parent == "." or listed.index(parent) < listed.index(path)
            if not (tmp_path / path).is_dir() or (tmp_path / path).is_symlink():
                found.setdefault(path, []).append(part["name"])
            elif path == "srv":
                assert part["name"] == "os"
    assert found == {
        "bin": ["os"],
        "usr/bin/bash": ["os"],
        "opt/tritonserver/bin/t": ["triton"],
        f"{VENV}/torch/a": ["torch"],
        "usr/local/cuda-13/b": ["cuda"],
    }


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, NIX / "split_rootfs.py", NIX / "ngc-parts.json", tmp_path]
    done = subprocess.run([*command, "cudo", "runner"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("cudo runner: the parts are triton, tensorrt, cuda")


def test_root_file_system_unpacks_without_modes_owners_and_devices(tmp_path: Path) -> None:
    (tmp_path / "tree" / "usr" / "bin").mkdir(parents=True)
    root = tmp_path / "new" / "root"
    exported = subprocess.run([sys.executable, EXPORT, tmp_path / "tree"], stdout=subprocess.PIPE)
    command = [sys.executable, NIX / "unpack_rootfs.py", root]
    done = subprocess.run(command, input=exported.stdout, capture_output=True)
    left_out = [line.partition(":")[0] for line in done.stderr.decode().splitlines()]
    assert (done.returncode, left_out) == (0, ["dev/null", "dev/loop0", "var/initctl"])
    assert (root / "usr" / "bin" / "su").stat().st_mode & 0o7777 == 0o755
    assert (root / "usr" / "bin" / "su.distrib").samefile(root / "usr" / "bin" / "su")
    assert (root / "usr" / "bin" / "away.2").readlink() == Path("/opt/not/here")
    assert (root / (root / "usr" / "share" / "long").readlink()).read_text() == "long"
    assert (root / "etc" / "nobody-reads").stat().st_mode & 0o444 == 0o444
    assert not (root / "etc" / "private" / "key").stat().st_mode & 0o111
