"""`cog-triton inspect`: its output for real tars and directories, and its refusals."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from command_line import ran
from sample_engines import (
    V0_7,
    V0_9,
    V1,
    changed,
    directory,
    original_tar,
    packed,
    small_tar,
    with_manifest,
)


def run(*arguments: str | Path) -> tuple[int, str]:
    result = ran("inspect", *arguments)
    return result.exit_code, result.output


def table(*arguments: str | Path) -> str:
    code, output = run(*arguments)
    assert code == 0, output
    assert max(map(len, output.splitlines())) <= 80
    return output


def document(*arguments: str | Path) -> dict[str, Any]:
    code, output = run("--json", *arguments)
    assert code == 0, output
    value: dict[str, Any] = json.loads(output)
    return value


def refusal(*arguments: str | Path, code: str = "E1306 EngineCorrupt") -> str:
    status, output = run(*arguments)
    assert status == 1
    assert output.startswith(f"error: {code}: ")
    return output


def test_table_and_json_of_a_tar_with_a_manifest(tmp_path: Path) -> None:
    tar = packed(tmp_path)
    output, value = table(tar), document(tar)
    lines = [line.split(maxsplit=1) for line in output.split("\n\n")[0].splitlines()]
    rows = {line[0]: line[1] for line in lines if len(line) == 2}
    facts = {
        "engine": "tensorrt_llm",
        "kind": "tar",
        "model_id": "Qwen/Qwen3-8B",
        "architecture": "Qwen3ForCausalLM",
        "sm": [90],
        "gpu_name": "NVIDIA H200",
        "max_seq_len": 8192,
        "max_num_tokens": 8192,
        "world_size": 4,
    }
    for name, fact in facts.items():
        shown = str(fact[0] if isinstance(fact, list) else fact)
        assert (value[name], rows[name].strip()) == (fact, shown)
    assert rows["versions"].strip() == "cuda 13.0, tensorrt 10.13, tensorrt_llm 1.2.1"
    assert rows["mapping"].strip() == "tp_size 2, pp_size 2, cp_size 1"
    files = [line.split() for line in output.splitlines() if ".engine " in line]
    assert [(row[0], row[-1]) for row in files] == [(f"rank{n}.engine", "ok") for n in range(4)]
    assert "All 6 files are as cog-triton.json says" in output
    rank = (tmp_path / "engine" / "rank3.engine").read_bytes()
    assert value["files"]["rank3.engine"] == {
        "size": 3004,
        "sha256": hashlib.sha256(rank).hexdigest(),
        "verified": True,
    }
    assert value["files"]["cog-triton.json"]["verified"] is False
    sizes = [path.stat().st_size for path in (tmp_path / "engine").iterdir()]
    assert value["size"] == sum(sizes)
    (tmp_path / "engine" / "timing").write_bytes(b"x")
    assert "Not named there: 1." in table(tmp_path / "engine")


@pytest.mark.parametrize(
    ("config", "ranks", "expected"),
    [(V0_9, 2, ("0.9.0", 1536, 8, 4)), (V1, 4, ("1.2.1", 8192, 64, 1))],
)
def test_a_tar_without_a_manifest_is_described_by_its_config(
    config: dict[str, Any], ranks: int, expected: tuple[object, ...], tmp_path: Path
) -> None:
    tar = original_tar(tmp_path / "original.tar", directory(tmp_path / "engine", config, ranks))
    value = document(tar)
    found = [value[key] for key in ("max_seq_len", "max_batch_size", "max_beam_width")]
    assert (value["versions"]["tensorrt_llm"], *found) == expected
    assert (value["engine"], value["world_size"]) == ("tensorrt_llm", ranks)
    assert (value["manifest"], value["sm"], value["model_id"]) == (False, None, None)
    assert not any(entry["verified"] for entry in value["files"].values())
    assert "No cog-triton.json" in table(tar)
    assert document(tmp_path / "engine")["files"] == value["files"]


def test_an_engine_before_0_8_is_described(tmp_path: Path) -> None:
    """Its files have other names, and its config another shape without a version."""
    engine = directory(tmp_path / "engine", V0_7, 0)
    for rank in range(2):
        (engine / f"gpt_float16_tp2_rank{rank}.engine").write_bytes(b"ftrt")
    value = document(original_tar(tmp_path / "original.tar", engine))
    assert (value["architecture"], value["dtype"], value["versions"]) == ("gpt", "float16", {})
    assert (value["world_size"], value["max_seq_len"], value["max_batch_size"]) == (2, 400, 256)
    (engine / "gpt_float16_tp2_rank1.engine").unlink()
    assert "rank1.engine is missing: config.json says tp 2 x pp 1" in refusal(engine)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("version", 1, "version: 1: Input should be a valid string"),
        ("build_config.max_input_len", "1024", "build_config.max_input_len: '1024': "),
        ("build_config.max_output_len", None, "must have max_seq_len, or max_output_len"),
        ("pretrained_config.mapping.tp_size", 4, "4 x 1 x 1 = 4"),
        ("pretrained_config.mapping", {"tp_size": 10**15}, "rank2.engine is missing: "),
        ("engine", "vllm", "engine: 'vllm': must be one of tensorrt_llm, openvino"),
    ],
)
def test_an_invalid_config_is_refused_by_key(
    path: str, value: Any, said: str, tmp_path: Path
) -> None:
    engine = directory(tmp_path / "engine", changed(V0_9, path, value), 2)
    tar = original_tar(tmp_path / "original.tar", engine)
    output = refusal(tar)
    assert f"{tar}: " in output
    assert said in output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"[" * 100_000, "not JSON"),
        (b"[]", "must have pretrained_config and build_config"),
        (b'{"builder_config": {}}', "before 0.8: pretrained_config.architecture: missing: "),
        (b" " * (17 << 20), "config.json has over 16777216 bytes"),
    ],
)
def test_a_foreign_config_is_refused(text: bytes, said: str, tmp_path: Path) -> None:
    tar = small_tar(tmp_path / "x.tar", config__json=text)
    assert said in refusal(tar)


def test_what_differs_from_the_manifest_is_named(tmp_path: Path) -> None:
    tar, engine = packed(tmp_path), tmp_path / "engine"
    whole = tar.read_bytes()
    content = whole
    for rank in (1, 3):
        content = content.replace(b"ftrt" + bytes([rank]), b"ftrT" + bytes([rank]))
    tar.write_bytes(content)
    output = refusal(tar)
    assert f"{tar}: rank1.engine has sha256 " in output
    assert "rank3.engine has sha256 " in output
    assert "rank2" not in output
    tar.write_bytes(whole)
    with tarfile.open(tar, "a") as file:
        for number in range(9):
            file.addfile(tarfile.TarInfo(f"extra{number}"))
    output = refusal(tar)
    assert "extra0 is in the tar but not in its manifest" in output
    assert output.endswith("; and 4 more\n")
    (engine / "rank0.engine").unlink()
    (engine / "tokenizer.json").write_text("{} ")
    output = refusal(engine)
    assert "rank0.engine is in the manifest but missing" in output
    assert "tokenizer.json has 3 bytes, the manifest says 2" in output
    (engine / "cog-triton.json").unlink()
    (engine / "rank0.engine").write_bytes(b"")
    assert "rank0.engine is empty" in refusal(engine)


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [("world_size", 1, 4), ("max_seq_len", 9, 8192)],
)
def test_a_manifest_that_disagrees_with_the_config(
    key: str, value: int, found: int, tmp_path: Path
) -> None:
    tar = packed(tmp_path, **{key: value})
    assert f"{key}: cog-triton.json says {value}, config.json {found}" in refusal(tar)


CONTROL = "a\n\x1b[2Jb\u202e"


def test_names_cannot_control_the_terminal(tmp_path: Path) -> None:
    named = directory(tmp_path / "engine", V1, 4)
    (named / CONTROL).write_bytes(b"x")
    foreign = small_tar(tmp_path / "foreign.tar", **{CONTROL: b"x"})
    lost = directory(tmp_path / "lost", V1, 4)
    (lost / CONTROL).write_bytes(b"x")
    with_manifest(lost)
    (lost / CONTROL).unlink()
    outputs = [
        *(run(original_tar(tmp_path / "x.tar", named))[1], run("--json", named)[1]),
        *(refusal(foreign), refusal(lost)),
    ]
    for output in outputs:
        assert not {"\x1b", "\u202e"} & set(output)
        assert "[2Jb" in output
        assert "a\\n" in output


@pytest.mark.parametrize(
    ("here", "said"), [([90] * 8, None), ([90, 90], "has 4 ranks, a GPU for each: 2 here")]
)
def test_check_gpu_compares_with_the_visible_gpus(
    here: list[int], said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's answer stands in for GPUs that a test machine does not have."""
    monkeypatch.setattr("cog_triton.system.gpus.visible_gpus", lambda: here)
    tar = packed(tmp_path)
    code, output = run("--check-gpu", tar)
    if said:
        assert code == 1
        assert "error: E1305 EngineIncompatible: " in output
        assert said in output
        return
    assert code == 0
    assert "this machine" in output
    assert document("--check-gpu", tar)["gpu_check"] == {"here": here, "problem": None}


def test_memory_use_is_independent_of_the_engines_size(tmp_path: Path) -> None:
    """Within an address space that 1 GiB of engine does not fit in; the file is a hole."""
    engine = directory(tmp_path / "engine", V1, 4)
    os.truncate(engine / "rank2.engine", 1 << 30)
    script = (
        "import resource, sys; from pathlib import Path;"
        " from cog_triton.inspection.description import describe;"
        " from cog_triton.sources.source import Source;"
        " used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize();"
        " resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2);"
        " print(describe(Source.open(sys.argv[1])).facts()['size'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(engine)], capture_output=True, check=True
    )
    assert int(done.stdout) > 1 << 30
