"""``cog-triton prune``: its table in 80 columns, its JSON, its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import ran
from fatbins import PTX, Image, container, cubin, library

from cog_triton_prune.report import architectures

MANY = [Image(number=n) for n in (75, 80, 86, 89, 90, 100, 103, 120, 121)] + [
    *(Image(number=n, variant="a") for n in (90, 100, 103, 120)),
    *(Image(number=n, variant="f") for n in (100, 120)),
    *(Image(PTX, n) for n in (80, 90, 120)),
]
FATBIN = container(*MANY) + container(Image(number=75))
RODATA = cubin(80) + cubin(90)
LONG = "libtensorrt_llm_kernels_with_a_name_that_is_longer_than_a_line_of_the_table.so"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, data in {
        "torch/lib/libtorch_cuda.so": library(FATBIN),
        f"tensorrt_llm/libs/{LONG}": library(FATBIN, RODATA),
        "nvidia/libcublasLt.so.13": library(FATBIN),
        "vllm/_C.abi3.so": library(container(Image(number=90))),
        "vllm/[red]x:bug:.py": b"",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path


def run(*arguments: str | Path) -> tuple[int, str, str]:
    result = ran("prune", *arguments)
    return result.exit_code, result.stdout, result.stderr


def squeezed(text: str) -> str:
    return " ".join(text.split())


def test_table_of_a_first_run(tree: Path) -> None:
    code, table, _ = run("--sm", "86", tree)
    assert code == 0
    assert max(map(len, table.splitlines())) <= 80
    said = squeezed(table)
    for words in (
        "torch/lib/libtorch_cuda.so",
        "sm_75 80 86 89 90 90a 100 100a 100f 103 103a 120 120a 120f 121, compute_80 90 120",
        "nothing for sm_86 in 1 of 2: kept whole",
        "nothing for sm_86 in 1 of 1: kept whole",
        "embedded MB: sm_80 0.0, sm_90 0.0; not pruned",
        "skipped: under NVIDIA's licence",
        "total",
        "sm_86: 2 pruned, 1 unchanged, 1 skipped, 1 without device code.",
        "--all-licences prunes what was skipped",
        "--embedded zeroes embedded cubins of other GPUs.",
        "Freed bytes are zeros: they shrink the compressed layer (pull, push, registry), not the"
        " unpacked files.",
    ):
        assert words in said
    assert LONG[:20] in table


def test_table_of_a_second_run(tree: Path) -> None:
    run("--sm", "86", "--embedded", tree)
    code, table, _ = run("--sm", "86", tree)
    assert code == 0
    assert "3 unchanged, 1 skipped" in table
    assert "zeros" not in table


def test_table_of_a_dry_run(tree: Path) -> None:
    _, table, _ = run("--sm", "8.6", "-n", "--embedded", tree)
    assert "sm_86: 2 to prune (dry run: nothing was written), 1 unchanged" in squeezed(table)
    assert "not pruned" not in table
    assert "zeroed: sm_90" in table


def test_json_has_all_results(tree: Path) -> None:
    code, text, errors = run("--sm", "sm_90", "--json", tree)
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
    bad.write_bytes(library(FATBIN + b"garbage!"))
    code, table, errors = run("--sm", "86", tree)
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
    code, out, errors = run(*arguments)
    assert (code, out) == (1, "")
    assert errors.startswith("error: E1005 ")
    assert message in errors


def test_a_tree_without_device_code(tmp_path: Path) -> None:
    code, table, _ = run("--sm", "86", tmp_path)
    assert code == 0
    assert "sm_86: 0 without device code." in table


def test_architectures_are_abbreviated() -> None:
    sizes = dict.fromkeys(
        ["lto_90", "sm_100f", "compute_80", "sm_90a", "sm_?", "sm_90", "sm_80"], 1
    )
    assert architectures(sizes) == "sm_? 80 90 90a 100f, compute_80, lto_90"
