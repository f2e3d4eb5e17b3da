"""scripts/doc-words counts what is written by hand, apart from code and what is generated."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "doc-words"
COUNTED = runpy.run_path(str(SCRIPT))["counted"]
PAGE = """# Two words

Words of a sentence, by hand - and of a table, whose lines are no words:

| a | b2 |
|---|--:|
| c | 3.5 |

<!-- not run: of no reader's eyes -->
```sh
cog-triton serve   # two, three
```

1. An item:

   ~~~
   in a list
   ~~~

<!-- table -->

| one | two |
|---|---|

~~~
three
~~~

<!-- /table -->
"""


def test_words_are_told_apart() -> None:
    by_hand = 2 + 15 + 4 + 3  # the heading, the sentence, the table, the item
    assert COUNTED(PAGE) == (by_hand, 7, 3)


def test_an_end_of_another_name_ends_no_table() -> None:
    assert COUNTED("<!-- a -->\none\n<!-- /b -->\ntwo\n<!-- /a -->\nthree\n") == (1, 0, 2)


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("made by make faults", "end"),
        ("made by make attack: stops", "end: stops"),
        ("h200 machine: made by benchmarks/gpu/table.py", "end of h200 machine"),
        ("figures of against_dynamo", "end"),
    ],
)
def test_figures_of_benchmarks_are_generated(begin: str, end: str) -> None:
    page = f"one\n<!-- {begin} -->\n| two |\n<!-- {end} -->\nthree\n"
    assert COUNTED(page + page) == (4, 0, 2)


@pytest.mark.parametrize(("many", "code"), [(50_000, 0), (50_001, 1)])
def test_more_than_there_may_be_are_refused(many: int, code: int, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("word\n" * 40_000)
    (tmp_path / "docs" / "a.md").write_text("word\n" * (many - 40_000) + "```\nmore\n```\n")
    command = [sys.executable, SCRIPT, "--hold", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split(",")[0]) == (code, f"doc-words: {many} by hand")
