"""The recipe for aiperf: its command line, its report as a real run wrote it, its failures."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cog_triton.errors import InvalidArgument, MissingExtra, NothingSucceeded

REPOSITORY = Path(__file__).parent.parent.parent
GOLDEN = Path(__file__).parent / "golden" / "bench" / "aiperf.json"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))


@pytest.fixture
def told() -> Any:
    """What aiperf 0.13.0 and we wrote of one server in one run, as far as it is read."""
    return json.loads(GOLDEN.read_text())


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return path


def test_every_number_is_read_in_aiperfs_units(told: Any) -> None:
    import aiperf_beside

    rows = {(row.title, row.point): row for row in aiperf_beside.rows(told["aiperf"], told["ours"])}
    assert len(rows) == 5 * 3 + 4
    for title, theirs, ours in (
        ("TTFT, ms", "time_to_first_token", "ttft_from_sending"),
        ("ITL (our TPOT), ms", "inter_token_latency", "tpot"),
        ("ICL (our ITL), ms", "inter_chunk_latency", "itl"),
        ("Request latency, ms", "request_latency", "e2el_from_sending"),
    ):
        for point, own in (("avg", "mean"), ("p50", "p50"), ("p99", "p99")):
            row = rows[title, point]
            assert told["aiperf"][theirs]["unit"] == "ms"
            assert row.theirs == told["aiperf"][theirs][point]
            assert row.ours == told["ours"]["metrics"][ours][own] * 1000
    assert rows["Input tokens", "avg"].ratio == rows["Output tokens", "avg"].ratio == 1
    rate = rows["Output tokens/s", "avg"]
    assert rate.ours == told["ours"]["rates"]["output_tokens"]
    assert rows["Requests/s", "avg"].theirs * 100 == pytest.approx(rate.theirs, rel=1e-4)
    far = {title for (title, _), row in rows.items() if not row.within}
    assert far == {"TTFT, ms"}, "so it was in that run"


def test_within_is_five_percent_either_way() -> None:
    from aiperf_beside import Row

    found = [Row("x", "avg", 100, ours).within for ours in (94.9, 95.1, 104.9, 105.1)]
    assert found == [False, True, True, False]
    assert Row("x", "avg", 0, 0).within
    assert not Row("x", "avg", 0, 1).within


def test_each_side_has_the_median_of_its_rounds() -> None:
    from aiperf_beside import Row, medians

    rounds = [[Row("x", "avg", a, b)] for a, b in ((1, 9), (5, 7), (3, 80))]
    assert medians(rounds) == [Row("x", "avg", 3, 9)]


def test_the_table_says_which_is_within() -> None:
    from aiperf_beside import Row, table
    from rich.console import Console

    console = Console(width=100, file=io.StringIO())
    with console.capture() as shown:
        console.print(table([Row("x", "avg", 100, 101), Row("y", "avg", 100, 80)], "t"))
    x, y = (line for line in shown.get().splitlines() if " avg " in line)
    assert "1.010" in x
    assert "not within 5 %" not in x
    assert "0.800" in y
    assert "not within 5 %" in y


def test_a_metric_that_is_not_there_is_named(told: Any) -> None:
    import _aiperf

    del told["aiperf"]["request_latency"]["p50"]
    with pytest.raises(InvalidArgument, match=r"no request_latency\.p50 \(aiperf 0\.13\.0\)"):
        _aiperf.value(told["aiperf"], "request_latency", "p50")


def test_an_answer_that_is_missing_ends_it(told: Any) -> None:
    from _aiperf import Load
    from aiperf_beside import require_whole

    load = Load(concurrency=4, requests=48, warmup=4, input_tokens=500, output_tokens=100, seed=0)
    require_whole(told["aiperf"], told["ours"], load)
    told["aiperf"]["request_count"]["avg"] = 47.0
    with pytest.raises(NothingSucceeded, match="of 48 requests aiperf completed 47"):
        require_whole(told["aiperf"], told["ours"], load)


@pytest.mark.parametrize("name", ["nowhere/aiperf", "."])
def test_without_aiperf_it_says_how_to_install_it(name: str, tmp_path: Path) -> None:
    script = REPOSITORY / "benchmarks" / "aiperf_beside.py"
    done = subprocess.run(
        [sys.executable, script, "--aiperf", tmp_path / name],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("E1401 MissingExtra: --aiperf=")
    assert "bin/pip install aiperf" in done.stderr


def test_a_file_that_cannot_run_is_not_aiperf(tmp_path: Path) -> None:
    import _aiperf

    (tmp_path / "aiperf").write_text("")
    with pytest.raises(MissingExtra, match="no such program"):
        _aiperf.require(tmp_path / "aiperf")
    _aiperf.require(program(tmp_path / "aiperf", ""))


def test_it_runs_without_the_hubs_offline_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In which aiperf refuses a tokenizer that is given by its path."""
    import _aiperf

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    text = (
        "import json, os, pathlib, sys\n"
        "found = [name for name in os.environ if name.endswith('OFFLINE')]\n"
        "path = pathlib.Path(sys.argv[1]) / 'profile_export_aiperf.json'\n"
        "path.write_text(json.dumps({'error_summary': found}))\n"
    )
    words = [str(program(tmp_path / "aiperf", text)), str(tmp_path / "out")]
    assert _aiperf.failures(_aiperf.run(words, tmp_path / "out")) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise SystemExit('no such option: --zzz')", ["ended with 1", "no such option: --zzz"]),
        ("print('ready')", ["ended with 0, without a report", "ready"]),
    ],
)
def test_a_failure_has_its_last_lines(text: str, words: list[str], tmp_path: Path) -> None:
    import _aiperf

    with pytest.raises(NothingSucceeded) as caught:
        _aiperf.run([str(program(tmp_path / "aiperf", text))], tmp_path / "out")
    for word in words:
        assert word in str(caught.value)
