"""`cog-triton` commands on the pages: every one exists, with the options that it is given."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from cog_triton.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^ *```(sh|console)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_BEFORE = re.compile(r"&&|\||;|\w+=.*|.+:TAG|-c")
_AFTER = {"&&", "|", ";", "&", ">", "2>", ">>"}
_PLACEHOLDERS = {"N": "2", "SECONDS": "1"}


def commands(page: Path) -> Iterator[list[str]]:
    """Words after `cog-triton`, of each command in the page's shell blocks."""
    for kind, block in _BLOCK.findall(page.read_text("utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            typed = line.strip()
            if kind == "console":
                if not typed.startswith("$ "):
                    continue
                typed = typed[2:]
            try:
                words = shlex.split(typed, comments=True)
            except ValueError:  # a quote that ends on another line
                continue
            yield from _ours(words)


def _ours(words: list[str]) -> Iterator[list[str]]:
    for place, word in enumerate(words):
        if Path(word).name != "cog-triton":
            continue
        if place and not _BEFORE.fullmatch(words[place - 1]):
            continue
        rest = words[place + 1 :]
        end = next((n for n, later in enumerate(rest) if later in _AFTER), len(rest))
        yield [_PLACEHOLDERS.get(one, one) for one in rest[:end]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_taken(page: Path) -> None:
    group = typer.main.get_command(app)
    wrong = []
    for words in commands(page):
        try:
            with group.context_class(group, info_name="cog-triton") as context:
                name, command, arguments = group.resolve_command(context, list(words))
                command.make_context(name, arguments, parent=context).close()
        except Exception as error:  # noqa: BLE001
            wrong.append(f"cog-triton {shlex.join(words)}: {type(error).__name__}: {error}")
        except SystemExit:  # --help
            pass
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_posted_json_is_said_to_be_json(page: Path) -> None:
    """Cog and the OpenAI API take no other; curl says that it is a form."""
    blocks = "\n".join(block for _, block in _BLOCK.findall(page.read_text("utf-8")))
    posts = [
        text for text in re.split(r"(?=\bcurl )", blocks) if re.search(r"/predictions|/v1/", text)
    ]
    posts = [text for text in posts if re.search(r"\s-d\s+['\"]?\{", text)]
    assert [text for text in posts if "Content-Type" not in text] == []


def test_commands_are_found() -> None:
    found = [words for page in PAGES for words in commands(page)]
    assert len(found) > 40
    assert ["serve", "engine.tar"] in found
