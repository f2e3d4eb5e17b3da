"""Pages of documentation: links resolve, generated tables are current, commands are taken."""

from __future__ import annotations

import re
import runpy
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from cog_triton.cli.app import app
from cog_triton.settings import GROUPS, Settings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "tests").rglob("*.md")]
LLMS = runpy.run_path(str(ROOT / "scripts" / "llms_txt.py"))
TABLES = runpy.run_path(str(ROOT / "scripts" / "doc_tables.py"))
_FENCE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return _FENCE.sub("", page.read_text("utf-8"))


def links(page: Path) -> list[str]:
    """Targets of the page's relative links."""
    return [link for link in _LINK.findall(prose(page)) if "://" not in link]


def anchors(page: Path) -> set[str]:
    """The page's anchors, as forges make them of headings."""
    found: Counter[str] = Counter()
    slugs = set()
    for heading in _HEADING.findall(prose(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        slugs.add(f"{slug}-{found[slug]}" if found[slug] else slug)
        found[slug] += 1
    return slugs


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    broken = re.findall(r"\]\([^)\s]+\)#\S+", prose(page))  # an anchor outside its link
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = {link.partition("#")[0] for link in links(DOCS / "README.md")}
    assert {page.name for page in DOCS.glob("*.md")} - listed == {"README.md"}


def test_the_chart_takes_the_settings_of_this_version() -> None:
    """If not: python scripts/doc_tables.py"""
    assert TABLES["SCHEMA"].read_text("utf-8") == TABLES["chart_schema"]()


def test_llms_txt_is_current() -> None:
    """If not: python scripts/doc_tables.py"""
    assert LLMS["LLMS"].read_text("utf-8") == LLMS["llms_txt"]()


@pytest.mark.parametrize("mark", TABLES["TABLES"])
def test_generated_tables_are_current(mark: str) -> None:
    """If not: python scripts/doc_tables.py"""
    page, _ = TABLES["TABLES"][mark]
    text = (DOCS / page).read_text("utf-8")
    assert TABLES["insert"](text, mark) == text


def test_every_setting_is_in_one_section_with_its_meaning() -> None:
    names = [name for group in GROUPS for name in group.model_fields]
    assert sorted(names) == sorted(Settings.model_fields)
    for name in names:
        assert (Settings.model_fields[name].description or "").endswith("."), name


def test_the_source_page_has_a_row_for_every_folder() -> None:
    text = (DOCS / "source.md").read_text("utf-8")
    table = text.partition("| folder of `cog_triton/` |")[2].partition("\n\n")[0]
    folders = {path.parent.name for path in (ROOT / "cog_triton").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == folders


@pytest.mark.parametrize("page", ["architecture.md", "source.md"])
def test_files_named_on_a_page_of_the_code_exist(page: str) -> None:
    named = re.findall(r"[\w/]+\.py\b", (DOCS / page).read_text("utf-8"))
    folders = ("cog_triton", "runner", "builder", "mock_cog_triton", "tests")
    files = [str(path) for name in folders for path in (ROOT / name).rglob("*.py")]
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []


COMMAND_PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
_SHELL = re.compile(r"^ *```(sh|console)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_BEFORE = re.compile(r"&&|\||;|\w+=.*|.+:TAG|-c")
_AFTER = {"&&", "|", ";", "&", ">", "2>", ">>"}
_PLACEHOLDERS = {"N": "2", "SECONDS": "1"}


def commands(page: Path) -> Iterator[list[str]]:
    """Words after `cog-triton`, of each command in the page's shell blocks."""
    for kind, block in _SHELL.findall(page.read_text("utf-8")):
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


@pytest.mark.parametrize("page", COMMAND_PAGES, ids=lambda page: page.stem)
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


@pytest.mark.parametrize("page", COMMAND_PAGES, ids=lambda page: page.stem)
def test_posted_json_is_said_to_be_json(page: Path) -> None:
    """Cog and the OpenAI API take no other; curl says that it is a form."""
    blocks = "\n".join(block for _, block in _SHELL.findall(page.read_text("utf-8")))
    posts = [
        text for text in re.split(r"(?=\bcurl )", blocks) if re.search(r"/predictions|/v1/", text)
    ]
    posts = [text for text in posts if re.search(r"\s-d\s+['\"]?\{", text)]
    assert [text for text in posts if "Content-Type" not in text] == []
