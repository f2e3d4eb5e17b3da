"""Prune PyTorch's and vLLM's libraries for this GPU and check that results stay the same.

    scripts/verify-prune [--vllm DIR] [--json FILE]

`cog-triton prune --output` makes the copies. The same operations run, each time in a fresh process,
with the originals (twice: what differs then proves nothing) and with the copies for this GPU. Then
the control: with copies for another GPU they must fail. Exit code 0 only if all of that holds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIBRARIES = {
    "torch": "libtorch_cuda.so",
    "_C": "_C_stable_libtorch.abi3.so",
    "_moe_C": "_moe_C_stable_libtorch.abi3.so",
    "_vllm_fa2_C": "_vllm_fa2_C.abi3.so",
    "_vllm_fa3_C": "_vllm_fa3_C.abi3.so",
}
TIMEOUT = 420


@dataclass(frozen=True)
class Site:
    """Paths of torch and of vLLM's libraries for a process; None for the originals or none."""

    torch: Path | None
    vllm: Path | None


def main() -> int:
    """Run everything; 0 if pruning changed nothing and the control failed as it must."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path, help="the directory vllm of an unpacked wheel")
    parser.add_argument("--json", type=Path, help="where to write every digest")
    options = parser.parse_args()
    sm, name = gpu()
    other = 90 if sm // 10 == 8 else 86
    print(f"{name}, sm_{sm}; control: sm_{other}", flush=True)
    with tempfile.TemporaryDirectory(prefix="verify-prune-") as made:
        work = Path(made)
        pruned, _ = prune(sm, options.vllm, work)
        foreign, changed = prune(other, options.vllm, work)
        original = Site(None, options.vllm)
        groups = [group for group in LIBRARIES if group == "torch" or options.vllm]
        jobs = {
            "original": (original, groups),
            "pruned": (pruned, groups),
            "torch for another GPU": (Site(foreign.torch, None), groups[:1]),
            "vLLM for another GPU": (Site(None, foreign.vllm), groups[1:]),
        }
        running = {
            key: start(site, wanted, work / f"cache {key}")
            for key, (site, wanted) in jobs.items()
            if wanted
        }
        runs = {key: finish(process) for key, process in running.items()}
        runs["original again"] = finish(start(original, groups, work / "cache original"))
    check_libraries(runs["pruned"], made, options.vllm)
    if options.json:
        options.json.write_text(json.dumps(runs, indent=1))
    same = compare(runs, groups)
    failing = control(runs, groups, changed)
    return 0 if same and failing else 1


def gpu() -> tuple[int, str]:
    """SM number and name of the first GPU."""
    code = "import torch as t; print(*t.cuda.get_device_capability(), t.cuda.get_device_name())"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    major, minor, name = said.stdout.strip().split(" ", 2)
    return int(major) * 10 + int(minor), name


def prune(sm: int, vllm: Path | None, work: Path) -> tuple[Site, set[str]]:
    """Copies of torch and of `vllm` for `sm`, and the names of the files that were changed."""
    spec = importlib.util.find_spec("torch")
    assert spec
    assert spec.origin
    torch = Path(spec.origin).parent
    output = work / f"sm_{sm}"
    command = ["-m", "cog_triton", "prune", "--sm", str(sm), "--output", output, "--json", torch]
    made = subprocess.run(
        [sys.executable, *command, *([vllm] if vllm else [])],
        check=True,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": f"{HERE.parents[1]}:{os.environ.get('PYTHONPATH', '')}"},
    )
    # torch finds cuBLAS and the like beside itself.
    if (torch.parent / "nvidia").exists():
        (output / "nvidia").symlink_to(torch.parent / "nvidia")
    report = json.loads(made.stdout)
    for row in report["files"]:
        freed = f"{row['freed'] / 1e6:.1f} MB freed"
        print(f"  sm_{sm} {Path(row['path']).name}: {row['action']}, {freed}", flush=True)
    changed = {Path(row["path"]).name for row in report["files"] if row["action"] == "pruned"}
    return Site(output, output / vllm.name if vllm else None), changed


def start(site: Site, groups: list[str], cache: Path) -> subprocess.Popen[str]:
    """Start a workload process; `cache` is the driver's JIT cache."""
    cache.mkdir(exist_ok=True)
    path = [str(site.torch)] if site.torch else []
    environment = os.environ | {
        "PYTHONPATH": ":".join([*path, os.environ.get("PYTHONPATH", "")]).strip(":"),
        "CUDA_CACHE_PATH": str(cache),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    command = [sys.executable, HERE / "workload.py", ",".join(groups)]
    return subprocess.Popen(
        [*command, *([site.vllm] if site.vllm else [])],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a workload; returns the JSON that it printed."""
    try:
        out, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    if process.returncode:
        raise SystemExit(f"{process.args!r} ended with exit code {process.returncode}")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def check_libraries(run: dict[str, Any], made: str, vllm: Path | None) -> None:
    """Exit unless the process loaded the pruned copies."""
    for group, name in LIBRARIES.items():
        loaded = [path for path in run["libraries"] if Path(path).name == name]
        if (group == "torch" or vllm) and not all(path.startswith(made) for path in loaded):
            raise SystemExit(f"{name} was loaded from {loaded}, not from {made}")


def compare(runs: dict[str, Any], groups: list[str]) -> bool:
    """Print the number of identical results, and each that differs."""
    good = True
    print(f"\n{'library':34} {'operations':>10} {'identical':>10} {'unusable':>10}")
    for group in groups:
        first, again, after = (
            runs[key]["results"][group] for key in ("original", "original again", "pruned")
        )
        usable = {
            name for name, result in first.items()
            if result == again[name] and not result.startswith("error")
        }  # fmt: skip
        identical = {name for name in usable if after[name] == first[name]}
        good &= bool(usable) and identical == usable
        unusable = len(first) - len(usable)
        print(f"{LIBRARIES[group]:34} {len(first):10} {len(identical):10} {unusable:10}")
        for name in first.keys() - identical:
            kind = "DIFFERENT" if name in usable else "not usable"
            print(f"  {kind}: {name}: {first[name]}, again {again[name]}, pruned {after[name]}")
    return good


def control(runs: dict[str, Any], groups: list[str], changed: set[str]) -> bool:
    """Print results of copies for another GPU; each changed library must fail somewhere.

    A kernel that is not there is an error only where the launch is checked; where it is not, the
    result is wrong.
    """
    good = True
    print(f"\n{'pruned for another GPU':34} {'operations':>10} {'errors':>10} {'wrong':>10}")
    for group in groups:
        key = "torch for another GPU" if group == "torch" else "vLLM for another GPU"
        results, first = runs[key]["results"][group], runs["original"]["results"][group]
        errors = [result for result in results.values() if result.startswith("error")]
        wrong = sum(result != first[name] for name, result in results.items()) - len(errors)
        good &= bool(errors or wrong) or LIBRARIES[group] not in changed
        print(f"{LIBRARIES[group]:34} {len(results):10} {len(errors):10} {wrong:10}")
        if errors:
            print(f"  as: {max(set(errors), key=errors.count)}")
    return good


if __name__ == "__main__":
    sys.exit(main())
