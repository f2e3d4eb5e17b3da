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
_RETURNS = {
    "not ready after s": "not_ready_s", "ready again": "ready_s", "first token": "first_token_s",
}  # fmt: skip


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
            rows.append(
                (
                    endpoint,
                    concurrency,
                    f"{row['tokens_per_s']:.0f}",
                    _spread(row),
                    _ratio(row["tokens_per_s"], base["tokens_per_s"]),
                    f"{row['ttft_p50']:.1f}",
                    f"{row['ttft_p99']:.1f}",
                    f"{row['ttft_p50'] - base['ttft_p50']:+.1f}",
                    f"{row['itl_p50']:.2f}",
                    _ratio(row["itl_p50"], base["itl_p50"]),
                    f"{row['itl_p99']:.2f}",
                    f"{row['tpot_p50']:.2f}",
                    _number(row, "tpot_p99"),
                    _number(row, "goodput"),
                    _ratio(1e6 * row["cores"], row["tokens_per_s"], 0),
                    f"{row['cores']:.2f}",
                    _ratio(row["cores"], base["cores"]),
                    f"{row['load_cores']:.2f}, {row['load_lag_p99']:.1f}",
                    *([_number(row, "ttft_mean", 1)] if has_mean else []),
                )
            )
    further = ["TTFT mean ms"] if has_mean else []
    return table((*_COLUMNS, *further), rows)


def _ratio(value: float, base: float, digits: int = 3) -> str:
    return f"{value / base:.{digits}f}" if base else "-"


def _number(row: Mapping[str, float], name: str, digits: int = 2) -> str:
    """A number that older runs have not."""
    return f"{row[name]:.{digits}f}" if name in row else "-"


def _spread(row: Mapping[str, float]) -> str:
    """How many rounds there were, and the least and the most of their tok/s."""
    count = f"{row['rounds']:.0f}"
    several = row["rounds"] > 1 and row.get("least")
    return f"{count}: {row['least']:.0f} to {row['most']:.0f}" if several else count


def cores(used: Mapping[str, Mapping[str, float]], concurrency: int) -> str:
    """Processor cores by endpoint and process."""
    found = [
        (endpoint, role, f"{share:.2f}")
        for endpoint, shares in used.items()
        for role, share in sorted(shares.items(), key=lambda item: -item[1])
        if share >= 0.005
    ]
    return table(("endpoint", f"process, at concurrency {concurrency}", "cores"), found)


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
         *(f"{parts[role]:.1f}" if role in parts else "-" for role in shown))
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
    told = []
    for name, phase in results.items():
        found = phase.get("checks", {})
        failed = [check for check, held in found.items() if held is not True]
        if found:
            told.append((name, len(found), len(failed), ", ".join(failed) or "-"))
    return table(("phase", "checks", "failed", "which"), told)


def pruning(phase: Mapping[str, Any]) -> str:
    """Sizes of pruned files in MB, and vLLM's start-up times."""
    files = [
        (row["file"], f"{row['size'] / 1e6:.1f}", f"{row['freed'] / 1e6:.1f}")
        for row in phase.get("files", ())
    ]
    starts = [
        (name.removesuffix(": start"), *(str(value.get(key, "-")) for key in
         ("seconds", "model_s", "compile_s", "graphs_s")))
        for name, value in phase.items() if name.endswith("start")
    ]  # fmt: skip
    sizes = table(("file", "MB", "freed"), files)
    times = table(("server", "ready after s", "model s", "compile s", "CUDA graphs s"), starts)
    return f"{sizes}\n\n{times}"


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
    names = ("streams", "whole", "same", "wrong", "hung", "lost", "longest_pause_s")
    columns = ("killed", *(name.replace("_s", " s").replace("_", " ") for name in names),
               "lost by", "not ready after s", "ready again", "first new token")  # fmt: skip
    by = ", ".join(f"{how}: {count}" for how, count in judged["lost_by"].items()) or "-"
    times = (back.get(name) for name in ("not_ready_s", "ready_s", "first_token_s"))
    shown = ("-" if time is None else str(time) for time in times)
    return table(columns, [(phase["killed"], *(judged[name] for name in names), by, *shown)])


def returns(phase: Mapping[str, Any]) -> str:
    """Kills of an engine's process: the streams, and seconds to readiness and the first token.

    Columns of which no row has anything are left out: older runs killed without streams.
    """
    rows = [
        {"server": name.removesuffix(": returns"), "killed": row["killed"],
         **{column: _known(row.get("streams", {}), key) for column, key in _OF_STREAMS.items()},
         **{column: _known(row, key) for column, key in _RETURNS.items()}}
        for name, found in phase.items() if name.endswith(": returns")
        for row in found
    ]  # fmt: skip
    columns = [
        column for column in ("server", "killed", *_OF_STREAMS, *_RETURNS)
        if column in _RETURNS or any(row[column] != "-" for row in rows)
    ]  # fmt: skip
    return table(columns, [[row[column] for column in columns] for row in rows])


def _known(found: Mapping[str, Any], key: str) -> object:
    return "-" if found.get(key) is None else found[key]


def starts(results: Mapping[str, Any]) -> str:
    """Seconds until each server of these phases was ready, as it and vLLM's log say."""
    rows = [
        (name.removesuffix(": start"), *(str(value.get(key, "-")) for key in
         ("seconds", "weights_s", "compile_s", "graphs_s", "engine_s", "kv_cache_tokens")))
        for phase in ("many", "peer", "pair", "replicas", "abilities")
        for name, value in results.get(phase, {}).items() if name.endswith(": start")
    ]  # fmt: skip
    return table(
        ("server", "ready after s", "weights s", "compile s", "CUDA graphs s", "engine s",
         "KV cache tokens"), rows)  # fmt: skip


_MARKS = {
    "process": "to the engine's process", "imported": "import", "configured": "configure",
    "core": "EngineCore", "loaded": "load", "compiled": "compile", "memory": "measure",
    "captured": "capture", "engine": "warm up", "ready": "to READY", "answer": "first answer",
}  # fmt: skip


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
        told = (row["part"], row["caches"], row["marks"]["ready"], *spent, row["files made"])
        rows.append(told)
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
    columns = (
        "class",
        "whole after kills",
        "the same again, of 64",
        *(f"{when}" for when in times),
    )
    return table((*columns, "longest pause s"), found)


def machine(phase: Mapping[str, Any]) -> str:
    """GPU, processor, kernel and package versions."""
    versions = [f"{name} {version}" for name, version in phase.get("vllm", {}).items()]
    own = [f"{name} {version}" for name, version in phase.get("ours", {}).items()]
    return "\n".join(
        (
            f"- GPU: {phase.get('gpu')}; processor: {phase.get('cpu')}; {phase.get('kernel')}",
            f"- vLLM's environment: {', '.join(versions)}",
            f"- ours: {', '.join(own)}",
        )
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    lines = [" | ".join(columns), " | ".join(["---", *["--:"] * (len(columns) - 1)])]
    lines += [" | ".join(map(str, row)) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def sections(results: Mapping[str, Any]) -> dict[str, str]:
    """Content by mark name, for the phases that were run."""
    prune = results.get("prune", {})
    made = {"checks": checks(results)}
    if "machine" in results:
        made["machine"] = machine(results["machine"])
    prefixes = {"bench": "", "small": "small model's ", "large": "large model's "}
    prefixes |= {"bench-python": "Python front end's ", "1b": "1B model's "}
    prefixes |= {
        "many": "many GPUs' ",
        "peer": "many GPUs' other ",
        "pair": "two engines' ",
        "replicas": "two engines of our choice's ",
    }
    for phase, prefix in prefixes.items():
        if medians := results.get(phase, {}).get("medians"):
            made[f"{prefix}benchmark"] = benchmark(medians)
            highest = max(int(concurrency) for found in medians.values() for concurrency in found)
            made[f"{prefix}cores"] = cores(results[phase]["cores"], highest)
        if costs := results.get(phase, {}).get("token_costs"):
            made[f"{prefix}token costs"] = token_costs(costs)
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
    if prune:
        made["pruning"] = pruning(prune)
        made["pruned benchmark"] = benchmark(prune.get("medians", {}))
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
