"""Every benchmark runs, briefly, on the real servers; what it measures is for `make bench`."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import run_all
from _servers import seed_server
from stack import REPOSITORY

from cog_triton.engines.mock import directory
from cog_triton.tokenizer import EngineTokenizer

pytestmark = pytest.mark.integration

SCRIPTS = REPOSITORY / "benchmarks"
ENGINE = ("through_path",)


@pytest.mark.parametrize("name", run_all.NAMES)
def test_a_benchmark(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    engine = [str(request.getfixturevalue("engine_dir"))] if name in ENGINE else []
    result = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / f"{name}.py"), "--quick", f"--json={result}", *engine],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert found["name"] == name
    assert found["machine"]
    for figure in found["figures"]:
        assert figure["name"] in done.stdout
        assert (figure["verdict"] == "") == (figure["target"] is None)
    assert found["figures"]
    assert all(grid["rows"] for grid in found["grids"])


def test_all_of_them_print_one_table_and_end_well_whatever_they_find(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "run_all.py"), "--quick", f"--results={tmp_path}"]
    done = subprocess.run(
        [*command, "--only=text_cost,load_generator"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout.partition("== all: ")[2]
    assert "text_cost" in table
    assert "load_generator" in table
    assert table.splitlines()[-1].endswith(" missed")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "load_generator.json",
        "text_cost.json",
    ]


def test_the_seeds_way_over_the_real_triton_says_what_the_mock_says(tmp_path: Path) -> None:
    engine = directory.make(tmp_path)
    ids = directory.read(engine).output_ids
    with seed_server(tokens_per_response=3) as server:
        answer = httpx.post(
            f"{server.url}/predictions", json={"input": {"max_tokens": len(ids)}}, timeout=60
        ).json()
    text = EngineTokenizer.load(engine).tokenizer.decode(ids)
    assert answer["status"] == "succeeded"
    assert "".join(answer["output"]) == text
    assert answer["metrics"]["output_token_count"] == len(ids)
