"""Compare the lines of each folder with the table in budget.txt: a number may only fall.

    scripts/budget.py              # exits with 1 and one line for each number that rose
    scripts/budget.py --lower      # writes the numbers that fell (make fmt does that)

Columns: code lines (lines of Python with a token other than a comment, a docstring or an import),
all lines of Python, bytes of all files, lines of all other files; `-` is not counted. A file
belongs to the longest folder of the table that it is in, and to `cog_triton` if the table names
none. A row `allowance NAME LINES` lets the package and `tests` together rise by so many lines while
that issue is open; its names and most lines are `ALLOWANCES`. Git's history of the table shows
whether a number was raised by hand.
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = "budget.txt"
PACKAGE, TESTS = GROWN = "cog_triton", "tests"
COLUMNS = ("code lines", "lines of Python", "bytes", "other lines")
ALLOWANCES = {
    "Real clients": 600,
    "One server": 2_500,
    "Fast starts": 600,
    "Proven by others": 900,
}
"""Issues that may add lines, and the most of each."""
MOST_LINES = 900  # of a Python file
MOST_COLUMNS, SPARE = 100, (1, 1, 100, 1)  # by column
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}
_SILENCED = re.compile(r"#\s*(?:noqa|type:\s*ignore|ruff:\s*noqa)")
Numbers = list[int | None]
"""One for each of `COLUMNS`; None is not counted."""


@dataclass
class Table:
    """What budget.txt says."""

    rows: dict[str, Numbers] = field(default_factory=dict)
    allowances: dict[str, int] = field(default_factory=dict)
    noqa: int = 0

    @classmethod
    def parse(cls, text: str) -> Table:
        """Raises ValueError with the line that is none."""
        table = cls()
        for line in text.splitlines():
            match line.split():
                case [] | ["#", *_]:
                    pass
                case ["allowance", *words, lines] if " ".join(words) in ALLOWANCES:
                    table.allowances[" ".join(words)] = int(lines)
                case ["noqa", count]:
                    table.noqa = int(count)
                case [folder, *numbers] if len(numbers) == len(COLUMNS):
                    table.rows[folder] = [None if one == "-" else int(one) for one in numbers]
                case _:
                    raise ValueError(f"{TABLE}: not a row: {line!r}")
        return table

    def text(self) -> str:
        """The file; `parse` reads it."""
        head = f"# {'folder':30}" + "".join(f"{name:>17}" for name in COLUMNS)
        lines = [f"# made by scripts/budget.py --lower; see its --help\n{head}"]
        for folder, numbers in self.rows.items():
            shown = "".join(f"{'-' if one is None else one:>17}" for one in numbers)
            lines.append(f"{folder:32}{shown}")
        lines.append(f"noqa {self.noqa}")
        lines += [f"allowance {name} {count}" for name, count in self.allowances.items()]
        return "\n".join(lines) + "\n"

    def total(self, column: int, *folders: str) -> int:
        """The sum of a column over the rows of `folders`."""
        return sum(row[column] or 0 for name, row in self.rows.items() if name.startswith(folders))


def code_lines(source: str) -> int:
    """Lines with a token other than a comment, a docstring or an import."""
    found = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            text and isinstance(node.value.value, str)
        ):
            found.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(found)


def folder_of(name: str, folders: Iterable[str]) -> str:
    """The longest of `folders` that a file is in; `.` has the files beside the folders."""
    inside = [each for each in folders if name.startswith(f"{each}/")]
    return max(inside, key=len) if inside else PACKAGE if "/" in name else "."


def measured(names: Iterable[str], folders: Iterable[str], wrong: Callable[[str], None]) -> Table:
    """The table of the files below `ROOT`; `wrong` gets what no table can allow."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0] * len(COLUMNS))
    found = Table()
    for name in names:
        data = (ROOT / name).read_bytes()
        row = sums[folder_of(name, folders)]
        row[2] += len(data)
        if b"\0" in data:
            continue
        lines = data.count(b"\n") + (not data.endswith(b"\n") and bool(data))
        if not name.endswith(".py"):
            row[3] += lines
            continue
        text = data.decode("utf-8")
        row[0] += code_lines(text)
        row[1] += lines
        found.noqa += len(_SILENCED.findall(text))
        if lines > MOST_LINES:
            wrong(f"{name} has {lines} lines, and at most {MOST_LINES} are allowed")
    found.rows = {folder: list(sums[folder]) for folder in folders}
    return found


def risen(table: Table, now: Table) -> list[str]:
    """One line for each number of `now` above the table's, beyond allowances."""
    wrong, allowed = [], sum(table.allowances.values())
    for column, title in enumerate(COLUMNS):
        spare = allowed * SPARE[column]
        for folder, numbers in table.rows.items():
            most, count = numbers[column], now.rows[folder][column]
            if most is not None and count is not None and (over := count - most) > 0:
                if folder.startswith(GROWN) and over <= spare:
                    spare -= over
                else:
                    wrong.append(f"{folder}: {count} {title}, and at most {most} are allowed")
    if now.noqa > table.noqa:
        wrong.append(f"{now.noqa} comments silence a check, and at most {table.noqa} are allowed")
    return wrong


def raised(before: Table, after: Table) -> list[str]:
    """One line for each number that was raised without an allowance."""
    allowed = sum(before.allowances.values())
    wrong = [
        f"{folder}: {title} raised from {old} to {new} in {TABLE}"
        for folder, numbers in after.rows.items()
        if not folder.startswith(PACKAGE)
        for title, old, new in zip(
            COLUMNS, before.rows.get(folder, [0] * len(COLUMNS)), numbers, strict=True
        )
        if old is not None and (new is None or (new > old and not (allowed and folder == TESTS)))
    ]
    for column, title in enumerate(COLUMNS):
        over = after.total(column, *GROWN) - before.total(column, *GROWN)
        if over > allowed * SPARE[column]:
            wrong.append(f"{PACKAGE}, {TESTS}: {title} raised by {over}, {allowed} are allowed")
    for name, count in after.allowances.items():
        if count > ALLOWANCES[name]:
            wrong.append(f"allowance {name}: {count} lines, and at most {ALLOWANCES[name]} are due")
    if after.noqa > before.noqa:
        wrong.append(f"noqa raised from {before.noqa} to {after.noqa} in {TABLE}")
    return wrong


def git(*words: str) -> str:
    """The output of a git command; raises CalledProcessError."""
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def history() -> list[Table]:
    """Every version of the table in git, the oldest first."""
    commits = git("log", "--reverse", "--format=%H", "--", TABLE).split()
    found = []
    for commit in commits:
        try:
            found.append(Table.parse(git("show", f"{commit}:{TABLE}")))
        except subprocess.CalledProcessError:  # a commit that removed it
            continue
    return found


def main() -> int:
    """Report, or lower, the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lower", action="store_true", help="write the numbers that fell")
    options = parser.parse_args()
    table = Table.parse((ROOT / TABLE).read_text("utf-8"))
    wrong: list[str] = []
    try:
        names = [name for name in git("ls-files").splitlines() if (ROOT / name).is_file()]
        versions = [*history(), table]
    except subprocess.CalledProcessError:
        print("budget: not a git checkout: nothing is compared", file=sys.stderr)
        return 0
    now = measured(names, table.rows, wrong.append)
    if options.lower:
        table.rows = {
            folder: [
                None if most is None or count is None else min(most, count)
                for most, count in zip(numbers, now.rows[folder], strict=True)
            ]
            for folder, numbers in table.rows.items()
        }
        table.noqa = min(table.noqa, now.noqa)
        (ROOT / TABLE).write_text(table.text(), "utf-8")
        return 0
    wrong += risen(table, now)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    if (found := settings["tool"]["ruff"]["line-length"]) != MOST_COLUMNS:
        wrong.append(f"pyproject.toml: line-length = {found}, and it stays {MOST_COLUMNS}")
    for before, after in itertools.pairwise(versions):
        wrong += raised(before, after)
    print(*(f"budget: {line}" for line in wrong), sep="\n", end="\n" if wrong else "")
    print(f"budget: {PACKAGE} has {now.total(1, PACKAGE)} lines, {now.total(0, PACKAGE)} of code")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
