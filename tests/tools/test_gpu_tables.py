"""benchmarks/gpu/table.py: tables of results, and the pages that have them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from script_modules import BENCHMARKS, ROOT, imported


@pytest.fixture(scope="module")
def gpu() -> Iterator[SimpleNamespace]:
    with imported(BENCHMARKS, ("bench", "table")) as modules:
        yield modules


def rows(
    endpoint: str, rates: list[float], itl: float = 3.0, cores: float = 1.25
) -> list[dict[str, Any]]:
    numbers = {"ttft_p50": 10.0, "ttft_p99": 20.0, "itl_p50": itl, "itl_p99": 6.0, "tpot_p50": 3.0}
    numbers |= {"tpot_p99": 4.0, "goodput": 2.5}
    numbers |= {"seconds": 1.0, "tokens_per_read": 1.0, "load_lag_p99": 0.1, "load_cores": 0.5}
    return [
        {
            "endpoint": endpoint,
            "concurrency": 1,
            "tokens_per_s": rate,
            "errors": [],
            "server_cores": {"engine": 1.0, "rest": cores - 1},
            **numbers,
        }
        for rate in rates
    ]


def measured(gpu: SimpleNamespace, seen: list[dict[str, Any]]) -> dict[str, Any]:
    return {"medians": gpu.bench.medians(seen)}


def test_a_token_costs_each_process_its_own(gpu: SimpleNamespace) -> None:
    seen = [*rows("vllm serve", [100, 300, 200]), *rows("cog", [200], cores=1.5)]
    costs = gpu.bench.token_cost_by_process(seen)
    assert costs["vllm serve"] == {"1": {"engine": 5000.0, "rest": 1250.0}}
    assert gpu.table.token_costs(costs).splitlines()[2:] == [
        "| vllm serve | 1 | 6250 | 5000.0 | 1250.0 |",
        "| cog | 1 | 7500 | 5000.0 | 2500.0 |",
    ]


def test_the_tables_are_written_between_their_marks(gpu: SimpleNamespace) -> None:
    seen = [*rows("vllm serve", [100, 300, 200]), *rows("cog", [190, 180, 500], 1.5, 2.5)]
    results = {
        "checks": {"checks": {"one": True, "two": "was 3"}},
        "bench": {**measured(gpu, seen), "checks": {"all": True}},
    }
    begin, end = gpu.table.MARKS
    made = gpu.table.sections(results)
    marks = "\n".join(f"{begin}\nold\n{end}".format(run="h1", name=name) for name in made)
    text = gpu.table.replace_sections(f"before\n{marks}\nafter\n", "h1", made)
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert (
        "| cog | 1 | 190 | 3: 180 to 500 | 0.950 | 10.0 | 20.0 | +0.0 | 1.50 | 0.500 | 6.00 | 3.00"
        " | 4.00 | 2.50 | 13158 | 2.50 | 2.000 | 0.50, 0.1 |" in text
    )
    assert "| checks | 2 | 1 | two |" in text
    assert gpu.table.replace_sections(text, "h1", made) == text


def test_the_table_of_starts_says_where_the_seconds_went(gpu: SimpleNamespace) -> None:
    ours = {"process": 2.0, "imported": 10.5, "configured": 11.0, "core": 11.5, "loaded": 15.0}
    runs = [
        {"part": "ours", "caches": "full", "marks": {**ours, "ready": 30.0, "answer": 30.25},
         "files made": 0},
        {"part": "peer", "caches": "empty", "marks": {"core": 20.0, "ready": 90.0, "answer": 91.0},
         "files made": 12},
    ]  # fmt: skip
    told = gpu.table.sections({"start": {"starts": runs}})["starts"]
    row = "| ours | full | 30.0 | 2.0 | 8.5 | 0.5 | 0.5 | 3.5 | - | - | - | - | 15.0 | 0.2 | 0 |"
    assert row in told
    assert (
        "| peer | empty | 90.0 | - | - | - | 20.0 | - | - | - | - | - | 70.0 | 1.0 | 12 |" in told
    )
    assert "starts" not in gpu.table.sections({"start": {"seconds": 3}}), "of verify-image"


def test_a_page_holds_chosen_tables_of_several_runs(gpu: SimpleNamespace) -> None:
    marks = "\n{}\n".join(gpu.table.MARKS)
    first, second = (marks.format("old", run=run, name="checks") for run in ("h1", "h2"))
    made = {"checks": "new", "machine": "not on the page"}
    text = gpu.table.replace_sections(f"{first}\n{second}", "h1", made)
    assert text == f"{first}\n{second}".replace("old", "\nnew\n", 1)


def test_a_run_of_some_phases_has_only_their_tables(gpu: SimpleNamespace) -> None:
    checked = {"checks": {"checks": {"one": True}}}
    assert gpu.table.document(checked).startswith("# Checks\n\n| phase |")
    assert "| checks | 1 | 0 | - |" in gpu.table.document(checked)
    assert "Benchmark" not in gpu.table.document(checked)
    seen = rows("cog", [100])
    document = gpu.table.document({**checked, "bench": measured(gpu, seen)})
    assert "| cog | 1 | 100 | 1 | 1.000 |" in document
    assert "Small model" not in document
    document = gpu.table.document({"small": measured(gpu, seen)})
    assert document.count("# Small model's ") == 1
    assert "# Benchmark" not in document


def test_marks_that_do_not_fit_the_run_are_errors(gpu: SimpleNamespace) -> None:
    begin, end = (mark.format(run="h1", name="machine") for mark in gpu.table.MARKS)
    for text, run, made, told in (
        (f"{begin}\n{end}", "h2", {"machine": ""}, "no place for h2"),
        (f"{begin}\n{end}", "h1", {}, "h1 has no machine"),
        (f"{begin}\n", "h1", {"machine": ""}, "0 places for <!-- h1 machine"),
        (f"{begin}\n{end}\n" * 2, "h1", {"machine": ""}, "2 places for <!-- h1 machine"),
    ):
        with pytest.raises(ValueError, match=told):
            gpu.table.replace_sections(text, run, made)


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("gpu.md", {"h200", "h200-two", "h200-front-ends"}),
        ("gpu-image.md", {"h100-image"}),
        ("gpu-several.md", {"h200-x4"}),
        ("parking.md", {"h100-spare"}),
        ("vllm.md", {"h200-three", "h200-prefix", "h200-seals", "h200-tp", "h200-images"}),
    ],
)
def test_pages_have_the_tables_of_their_results(
    page: str, expected: set[str], gpu: SimpleNamespace
) -> None:
    docs = ROOT / "docs"
    text = (docs / page).read_text("utf-8")
    assert set(re.findall(r"<!-- ([\w-]+) .*: made by", text)) == expected
    for run in expected:
        results = json.loads((ROOT / "benchmarks" / "results" / f"{run}.json").read_text("utf-8"))
        assert gpu.table.replace_sections(text, run, gpu.table.sections(results)) == text


def test_a_kill_under_streams_has_more_columns(gpu: SimpleNamespace) -> None:
    back = {"not_ready_s": 0.1, "ready_s": 2.0, "first_token_s": 2.2}
    bare = {"killed": "vLLM EngineCore", **back}
    old = gpu.table.returns({"spare: returns": [bare]})
    assert old.splitlines()[0].count("|") == 6
    assert "| spare | vLLM EngineCore | 0.1 | 2.0 | 2.2 |" in old
    streams = {"streams": 64, "whole": 63, "lost": 1, "hung": 0, "same": 60, "wrong": 3}
    streams |= {"same_undisturbed": 61, "longest_pause_s": 2.5}
    new = gpu.table.returns(
        {
            "spare: returns": [{**bare, "streams": streams, "ready_s": None}],
            "asleep: returns": [{"killed": "refused"}],
            "no-spare: returns": [bare],
        }
    )
    row = "| spare | vLLM EngineCore | 64 | 63 | 1 | 0 | 60 | 61 | 2.5 | 0.1 | - | 2.2 |"
    assert row in new
    assert f"| asleep | refused |{' - |' * 10}" in new
    assert f"| no-spare | vLLM EngineCore |{' - |' * 7} 0.1 | 2.0 | 2.2 |" in new


def test_every_run_is_on_a_page() -> None:
    runs = {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    older = {"h200", "h200-two", "h100-image", "h200-x4"}
    newer = {"h200-prefix", "h200-seals", "h200-tp", "h200-images", "h200-front-ends"}
    assert runs == older | newer | {"h200-three", "h100-spare"}


def test_an_endpoint_without_answers_has_a_row(gpu: SimpleNamespace) -> None:
    seen = [*rows("vllm serve", [0]), *rows("cog", [100])]
    assert "| cog | 1 | 100 | 1 | - |" in gpu.table.benchmark(gpu.bench.medians(seen))
