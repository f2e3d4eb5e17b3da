"""Markdown tables of GPU runs, written into docs/gpu.md between marks that name the run's file.

python benchmarks/gpu/table.py benchmarks/results/h100.json [docs/gpu.md]
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

MARKS = "<!-- {run} {name}: made by benchmarks/gpu/table.py -->", "<!-- end of {run} {name} -->"
_COLUMNS = (
    "endpoint", "concurrency", "tok/s", "rounds", "/ first", "TTFT p50 ms", "p99", "- first",
    "ITL p50 ms", "/ first", "p99", "TPOT p50 ms", "p99", "goodput /s", "us a token", "cores",
    "/ first", "load's cores, lag p99 ms",
)  # fmt: skip
_OF_STREAMS = {
    "streams": "streams", "whole": "whole", "lost": "lost", "hung": "hung",
    "same text": "same", "without a kill": "same_undisturbed", "longest pause s": "longest_pause_s",
}  # fmt: skip
_KILLED = {
    "streams": "streams", "whole": "whole", "same": "same", "wrong": "wrong", "hung": "hung",
    "lost": "lost", "longest pause s": "longest_pause_s",
}  # fmt: skip
_RETURNS = {
    "not ready after s": "not_ready_s", "ready again": "ready_s", "first token": "first_token_s",
}  # fmt: skip
_STARTS = {
    "ready after s": "seconds", "weights s": "weights_s", "compile s": "compile_s",
    "CUDA graphs s": "graphs_s", "engine s": "engine_s", "KV cache tokens": "kv_cache_tokens",
}  # fmt: skip
_MARKS = {
    "process": "to the engine's process", "imported": "import", "configured": "configure",
    "core": "EngineCore", "loaded": "load", "compiled": "compile", "memory": "measure",
    "captured": "capture", "engine": "warm up", "ready": "to READY", "answer": "first answer",
}  # fmt: skip
_BENCHMARKS = {
    "bench": "benchmark", "small": "small model's benchmark", "large": "large model's benchmark",
    "bench-python": "Python front end's benchmark", "1b": "1B model's benchmark",
    "many": "many GPUs' benchmark", "peer": "many GPUs' other benchmark",
    "replicas": "two engines of our choice's benchmark", "prune": "pruned benchmark",
}  # fmt: skip
"""Names of the tables of phases that measure endpoints."""


def benchmark(medians: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """A row for each endpoint and concurrency, compared to the first endpoint."""
    rows = []
    first = next(iter(medians), "")
    has_mean = any("ttft_mean" in row for of in medians.values() for row in of.values())
    for concurrency in medians.get(first, {}):
        base = medians[first][concurrency]
        for endpoint, found in medians.items():
            if (row := found.get(concurrency)) is None:
                continue
            cells = (
                *(endpoint, concurrency, f"{row['tokens_per_s']:.0f}", _spread(row)),
                _ratio(row["tokens_per_s"], base["tokens_per_s"]),
                *(_number(row, "ttft_p50", 1), _number(row, "ttft_p99", 1)),
                f"{row['ttft_p50'] - base['ttft_p50']:+.1f}",
                *(_number(row, "itl_p50"), _ratio(row["itl_p50"], base["itl_p50"])),
                *(_number(row, "itl_p99"), _number(row, "tpot_p50"), _number(row, "tpot_p99")),
                *(_number(row, "goodput"), _ratio(1e6 * row["cores"], row["tokens_per_s"], 0)),
                *(_number(row, "cores"), _ratio(row["cores"], base["cores"])),
                f"{row['load_cores']:.2f}, {row['load_lag_p99']:.1f}",
            )
            rows.append((*cells, _number(row, "ttft_mean", 1)) if has_mean else cells)
    return table((*_COLUMNS, *(["TTFT mean ms"] if has_mean else [])), rows)


def _ratio(value: float, base: float, digits: int = 3) -> str:
    return f"{value / base:.{digits}f}" if base else "-"


def _number(row: Mapping[str, float], name: str, digits: int = 2) -> str:
    """A number that older runs may not have."""
    return f"{row[name]:.{digits}f}" if name in row else "-"


def _spread(row: Mapping[str, float]) -> str:
    """How many rounds there were, and the least and the most of their tok/s."""
    count = f"{row['rounds']:.0f}"
    several = row["rounds"] > 1 and row.get("least")
    return f"{count}: {row['least']:.0f} to {row['most']:.0f}" if several else count


def token_costs(costs: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Microseconds of CPU a token by process, at each concurrency; the dearest process first."""
    rows = [
        (int(concurrency), endpoint, _with_stubs_together(parts))
        for endpoint, of in costs.items()
        for concurrency, parts in of.items()
    ]
    roles = {role for *_, parts in rows for role in parts}
    most = {role: max(parts.get(role, 0.0) for *_, parts in rows) for role in roles}
    shown = sorted((role for role in roles if most[role] >= 1), key=lambda role: -most[role])
    found = [
        (endpoint, concurrency, f"{sum(parts.values()):.0f}",
         *(_number(parts, role, 1) for role in shown))
        for concurrency, endpoint, parts in sorted(rows, key=lambda row: row[0])
    ]  # fmt: skip
    return table(("endpoint", "concurrency", "all", *shown), found)


def _with_stubs_together(parts: Mapping[str, float]) -> Mapping[str, float]:
    summed: dict[str, float] = {}
    for role, cost in parts.items():
        name = "Triton's stubs" if role.startswith("Triton stub") else role
        summed[name] = summed.get(name, 0.0) + cost
    return summed


def checks(results: Mapping[str, Any]) -> str:
    """Number of checks by phase, and the names of those that failed."""
    rows = []
    for name, phase in results.items():
        found = phase.get("checks", {})
        failed = [check for check, held in found.items() if held is not True]
        if found:
            rows.append((name, len(found), len(failed), ", ".join(failed) or "-"))
    return table(("phase", "checks", "failed", "which"), rows)


def pair(results: Mapping[str, Any]) -> str:
    """Two engines' benchmark, compared to one engine's on all GPUs by the first same endpoint.

    Beside vLLM's data parallelism are two engines that we choose from.
    """
    two = {
        f"{kind}, {name}": found
        for phase, kind in (("pair", "two engines"), ("replicas", "two of our choice"))
        for name, found in results.get(phase, {}).get("medians", {}).items()
    }
    first = next(iter(two)).rpartition(", ")[2]
    one = results.get("many", {}).get("medians", {}).get(first)
    return benchmark({f"one engine, {first}": one, **two} if one else two)


def killed(phase: Mapping[str, Any]) -> str:
    """What became of the streams when a worker was killed, and how long the way back took."""
    judged, back = phase["streams"], phase.get("return", {})
    by = ", ".join(f"{how}: {count}" for how, count in judged["lost_by"].items()) or "-"
    columns = ("killed", *_KILLED, "lost by", "not ready after s", "ready again",
               "first new token")  # fmt: skip
    row = (phase["killed"], *_known(judged, _KILLED), by, *_known(back, _RETURNS))
    return table(columns, [row])


def returns(phase: Mapping[str, Any]) -> str:
    """Kills of an engine's process: the streams, and seconds to readiness and the first token.

    Older runs killed without streams, and have no columns for them.
    """
    found = [(name.removesuffix(": returns"), row) for name, rows in phase.items()
             if name.endswith(": returns") for row in rows]  # fmt: skip
    streams = _OF_STREAMS if any("streams" in row for _, row in found) else {}
    rows = [
        (name, row["killed"], *_known(row.get("streams", {}), streams), *_known(row, _RETURNS))
        for name, row in found
    ]
    return table(("server", "killed", *streams, *_RETURNS), rows)


def starts(results: Mapping[str, Any]) -> str:
    """Seconds until each server of these phases was ready, as it and vLLM's log say."""
    rows = [
        (name.removesuffix(": start"), *_known(value, _STARTS))
        for phase in ("many", "peer", "pair", "replicas", "abilities")
        for name, value in results.get(phase, {}).items()
        if name.endswith(": start")
    ]
    return table(("server", *_STARTS), rows)


def _known(found: Mapping[str, Any], columns: Mapping[str, str]) -> list[object]:
    """Cells of columns by their keys, with a dash for what a run has not."""
    return ["-" if found.get(key) is None else found[key] for key in columns.values()]


def start_marks(phase: Mapping[str, Any]) -> str:
    """Seconds of each start from one mark to the next; a mark that is missing is the next one's."""
    rows = []
    for row in phase["starts"]:
        last, spent = 0.0, []
        marks = {"process": row["marks"].get("keeper"), **row["marks"]}  # its name until 0.4.1
        for mark in _MARKS:
            at = marks.get(mark)
            spent.append("-" if at is None else f"{at - last:.1f}")
            last = last if at is None else at
        rows.append((row["part"], row["caches"], row["marks"]["ready"], *spent, row["files made"]))
    columns = ("server", "caches", "READY after s", *_MARKS.values(), "files compiled")
    return table(columns, rows)


def resumed(phase: Mapping[str, Any]) -> str:
    """Streams of each class after kills of their engine: whole, and equal to undisturbed ones."""
    rows: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in phase["streams"]:
        rows.setdefault(row["class"], {})[row["when"]] = row
    times = [when for when in rows["greedy"] if when.startswith("killed")]
    found = []
    for name, by_time in rows.items():
        whole = [tuple(map(int, by_time[when]["whole"].split(" of "))) for when in times]
        all_whole = f"{sum(some for some, _ in whole)} of {sum(every for _, every in whole)}"
        same = [str(by_time[when]["same"]) for when in times]
        pause = max(by_time[when]["longest_pause_s"] for when in times)
        again = by_time["undisturbed again"]["same"]
        found.append((name, all_whole, again, *same, f"{pause:.1f}"))
    columns = ("class", "whole after kills", "the same again, of 64", *times, "longest pause s")
    return table(columns, found)


def machine(phase: Mapping[str, Any]) -> str:
    """GPU, processor, kernel and package versions."""
    versions, own = (
        ", ".join(f"{name} {version}" for name, version in phase.get(of, {}).items())
        for of in ("vllm", "ours")
    )
    hardware = f"GPU: {phase.get('gpu')}; processor: {phase.get('cpu')}; {phase.get('kernel')}"
    return f"- {hardware}\n- vLLM's environment: {versions}\n- ours: {own}"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    lines = [" | ".join(columns), " | ".join(["---", *["--:"] * (len(columns) - 1)])]
    lines += [" | ".join(map(str, row)) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def sections(results: Mapping[str, Any]) -> dict[str, str]:
    """Content by mark name, for the phases that were run."""
    made = {"checks": checks(results)}
    if "machine" in results:
        made["machine"] = machine(results["machine"])
    for phase, name in _BENCHMARKS.items():
        if medians := results.get(phase, {}).get("medians"):
            made[name] = benchmark(medians)
        if costs := results.get(phase, {}).get("token_costs"):
            made[name.removesuffix("benchmark") + "token costs"] = token_costs(costs)
    if any(results.get(phase, {}).get("medians") for phase in ("pair", "replicas")):
        made["two engines' benchmark"] = pair(results)
    for phase, name in {"kill": "killed worker", "replicas": "killed engine of two"}.items():
        if "streams" in results.get(phase, {}):
            made[name] = killed(results[phase])
    if any(phase in results for phase in ("many", "pair", "replicas")):
        made["many GPUs' starts"] = starts(results)
    if found := results.get("park"):
        made["returns"] = returns(found)
    if results.get("start", {}).get("starts"):  # verify-image has another phase of this name
        made["starts"] = start_marks(results["start"])
    if results.get("resume", {}).get("streams"):
        made["resumed streams"] = resumed(results["resume"])
    return made


def document(results: Mapping[str, Any]) -> str:
    """All tables of a run, as a page of their own."""
    made = sections(results)
    return "\n".join(f"# {name.capitalize()}\n\n{content}\n" for name, content in made.items())


def replace_sections(text: str, run: str, made: Mapping[str, str]) -> str:
    """`text` with the content between the marks of `run` replaced.

    A page need not have marks for all that was made. Raises ValueError for a page without marks of
    the run, a mark without its end, and one for which nothing was made.
    """
    names = re.findall(MARKS[0].format(run=re.escape(run), name="([^:\n]+)"), text)
    if not names:
        raise ValueError(f"no place for {run}")
    for name in names:
        if name not in made:
            raise ValueError(f"{run} has no {name}")
        begin, end = (mark.format(run=run, name=name) for mark in MARKS)
        pattern = f"({re.escape(begin)}\n).*?({re.escape(end)})"
        content = f"\n{made[name]}\n\n"
        text, count = re.subn(
            pattern, lambda match, c=content: f"{match[1]}{c}{match[2]}", text, flags=re.S
        )
        if count != 1:
            raise ValueError(f"{count} places for {begin}")
    return text


def main() -> None:
    """Command line: rewrite the document."""
    parser = argparse.ArgumentParser(description="Write the tables of a run into a document.")
    parser.add_argument("results", type=Path, help="a run's results, named RUN.json")
    parser.add_argument("document", type=Path, nargs="?", default=Path("docs/gpu.md"))
    options = parser.parse_args()
    made = sections(json.loads(options.results.read_text("utf-8")))
    text = options.document.read_text("utf-8")
    options.document.write_text(replace_sections(text, options.results.stem, made), "utf-8")


if __name__ == "__main__":
    main()
