"""Run all benchmarks one after another; prints one table of figures and targets.

Each writes .work/bench/NAME.json. Ends with 0 whether or not targets are met, and with 1 after a
benchmark that failed.

    .venv/bin/python benchmarks/run_all.py [engine.tar] [--only=NAME,NAME] [--quick]

With --write=docs/performance.md the table goes between that page's marks, too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import _report

HERE = Path(__file__).parent
NAMES = (
    "against_original",
    "against_dynamo",
    "through_path",
    "fixed_rate",
    "disturbed",
    "front_cost",
    "hot_path",
    "tenants",
    "text_cost",
    "start_up",
    "memory",
    "growth",
    "load_generator",
)
WITH_ENGINE = ("through_path", "start_up")
MARKS = "<!-- made by benchmarks/run_all.py -->\n", "<!-- end -->"


def chosen(text: str) -> list[str]:
    """Parse names separated by commas; raises ArgumentTypeError for an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in NAMES:
            raise argparse.ArgumentTypeError(f"{name!r}: must be of {', '.join(NAMES)}")
    return names


def command(name: str, args: argparse.Namespace, result: Path) -> list[str]:
    """Command line of one benchmark."""
    words = [sys.executable, str(HERE / f"{name}.py"), f"--json={result}"]
    if args.quick:
        words.append("--quick")
    if args.original_checkout and name == "against_original":
        words.append(f"--original-checkout={args.original_checkout}")
    if args.engine and name in WITH_ENGINE:
        words.append(str(args.engine))
    return words


def write(page: Path, grid: _report.Grid, machine: str) -> None:
    """Write the table between the marks of a Markdown page; raises ValueError without marks."""
    before, between, after = page.read_text().partition(MARKS[0])
    _, end, after = after.partition(MARKS[1])
    if not (between and end):
        raise ValueError(f"{page}: has no marks {MARKS[0].strip()} and {MARKS[1]}")
    lines = [" | ".join(grid.columns), "--- | --- | --: | --: | ---"]
    lines += [" | ".join(row) for row in grid.rows]
    table = "\n".join(f"| {line} |" for line in lines)
    page.write_text(f"{before}{between}{machine}\n\n{table}\n{end}{after}")


def main() -> int:
    """Run the chosen benchmarks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path, nargs="?", help="engine.tar")
    parser.add_argument("--only", type=chosen, default=list(NAMES), help="names, by comma")
    parser.add_argument("--quick", action="store_true", help="seconds, to see that all run")
    parser.add_argument("--original-checkout", type=Path, help="the original cog-triton's sources")
    parser.add_argument("--results", type=Path, default=_report.RESULTS, help="directory for JSON")
    parser.add_argument("--write", type=Path, help="a page to put the table into")
    args = parser.parse_args()
    figures: dict[str, list[_report.Figure]] = {}
    failed = []
    began = time.monotonic()
    for name in args.only:
        result = args.results / f"{name}.json"
        result.unlink(missing_ok=True)
        print(f"\n== {name}", flush=True)
        if subprocess.run(command(name, args, result)).returncode or not result.is_file():
            failed.append(name)
        else:
            figures[name] = _report.read_figures(result)
    machine = f"{_report.machine_name()}, {time.monotonic() - began:.0f} s"
    print(f"\n== all: {machine}", flush=True)
    _report.show(_report.summary(figures))
    if args.write:
        write(args.write, _report.summary(figures), f"{time.strftime('%Y-%m-%d')}, {machine}")
    verdicts = [figure.verdict for found in figures.values() for figure in found]
    print(f"{verdicts.count('met')} targets met, {verdicts.count('missed')} missed")
    for name in failed:
        print(f"{name} failed: it has no figures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
