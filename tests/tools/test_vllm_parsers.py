"""The report of vLLM's parsers: its answers, and the section of docs/clients.md that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import vllm_parsers
from _parser_formats import FORMATS

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"


@pytest.mark.parametrize("name", FORMATS)
def test_answers_are_tokens_of_the_formats_tokenizer(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    tokenizer = vllm_parsers.tokenizer_of(form, tmp_path)
    for text in form.answers().values():
        ids = tokenizer.encode(text)
        assert tokenizer.tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(tokenizer.token_id(mark) is not None for mark in form.marks())
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"]


def test_the_page_has_every_parser_and_is_written_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = PAGE.read_text("utf-8").partition("\n## Parsers of vLLM\n")[2]
    assert [name for name in FORMATS if f"`{name}`" not in section] == []
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "clients.md").write_text(PAGE.read_text("utf-8"), "utf-8")
    results = tmp_path / "results"
    verdicts = {"a": {"verdict": "equal"}, "b": {"verdict": "differs", "differences": ["<x|>"]}}
    results.write_text(json.dumps(verdicts))
    monkeypatch.setattr(vllm_parsers, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["vllm_parsers.py", f"--results={results}", "--write"])
    assert vllm_parsers.main() == 0
    written = (tmp_path / "docs" / "clients.md").read_text("utf-8")
    assert "|---|---|\n| `b` | differs &lt;x&#124;> |\n\n<!-- /parsers -->\n" in written
    assert "1 of 2 are equal: `a`." in written
    assert (
        written.partition("## Parsers of vLLM")[0]
        == (PAGE.read_text("utf-8").partition("## Parsers of vLLM")[0])
    )
