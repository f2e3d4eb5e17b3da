"""Pages of documentation: links resolve, generated tables are current, no page is out of reach."""

from __future__ import annotations

import re
import runpy
from collections import Counter
from pathlib import Path

import pytest
import yaml

from cog_triton.errors import all_errors
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


def test_every_page_begins_with_its_why() -> None:
    """With what it is for and when it is needed, in prose, before any command, table or list."""
    lacking = []
    for page in DOCS.glob("*.md"):
        text = re.sub(r"<!--.*?-->\n*", "", page.read_text("utf-8"), flags=re.DOTALL)
        _, _, rest = text.partition("\n\n")
        why = re.split(r"^(?:```|~~~|\||- |\d+\. |#)", rest, maxsplit=1, flags=re.MULTILINE)[0]
        if len(why.split()) < 40:
            lacking.append(page.name)
    assert lacking == []


def test_the_chart_takes_the_settings_of_this_version() -> None:
    """If not: python scripts/doc_tables.py"""
    assert TABLES["SCHEMA"].read_text("utf-8") == TABLES["chart_schema"]()
    assert '"MAX_QUEUE"' in TABLES["chart_schema"]()


def test_llms_txt_is_current() -> None:
    """If not: python scripts/doc_tables.py"""
    text = LLMS["LLMS"].read_text("utf-8")
    assert text == LLMS["llms_txt"]()
    listed = set(re.findall(r"^- \[.*\]\((.+)\): .", text, re.MULTILINE))
    assert {f"docs/{page.name}" for page in DOCS.glob("*.md")} - listed == {"docs/README.md"}
    assert not [path for path in listed if not (ROOT / path).exists()]


@pytest.mark.parametrize("mark", TABLES["TABLES"])
def test_generated_tables_are_current(mark: str) -> None:
    """If not: python scripts/doc_tables.py"""
    page, _ = TABLES["TABLES"][mark]
    text = (DOCS / page).read_text("utf-8")
    assert TABLES["insert"](text, mark) == text


def test_the_table_of_errors_has_a_whole_row_for_each() -> None:
    _, made = TABLES["TABLES"]["errors"]
    head, _, *rows = (
        [cell.strip() for cell in row[1:-1].split("|")] for row in made().splitlines()
    )
    assert [row[0] for row in rows] == [error.code for error in all_errors()]
    assert all(all(row) for row in (head, *rows))


def test_the_public_home_is_named_in_one_place() -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    urls = re.search(r"^\[project\.urls\]\n(?:.+\n)*?Repository = \"(.+)\"$", project, re.MULTILINE)
    home = urls and urls[1]
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "Chart.yaml").read_text("utf-8"))
    assert chart.get("home") == home
    assert chart.get("sources") == (home and [home])
    tracked = [*PAGES, ROOT / "llms.txt"]
    for folder in ("nix", "deploy", "scripts", "cog_triton", "runner", "builder"):
        tracked += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    others = {
        f"{path.relative_to(ROOT)}: {found}"
        for path in tracked
        for found in re.findall(
            r"(?:github:|https?://[\w.-]+/)[\w.-]+/cog-triton\b",
            path.read_text("utf-8", errors="replace"),
        )
        if found != home and "example.com" not in found
    }
    assert others == set()


def test_every_setting_is_in_one_section_with_its_meaning() -> None:
    names = [name for group in GROUPS for name in group.model_fields]
    assert sorted(names) == sorted(Settings.model_fields)
    for name in names:
        assert (Settings.model_fields[name].description or "").endswith("."), name


def test_files_that_are_left_out_of_a_quick_run_are_there() -> None:
    named = (ROOT / "tests" / "unit" / "slow_files.txt").read_text("utf-8").split()
    assert named == sorted({*named} & {path.name for path in (ROOT / "tests" / "unit").iterdir()})


def test_the_readme_is_short_and_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 200
    assert re.search(r"^make serve\b", text, re.MULTILINE)
    assert re.search(r"^make test\b", text, re.MULTILINE)


def test_the_source_page_has_a_row_for_every_folder() -> None:
    text = (DOCS / "source.md").read_text("utf-8")
    table = text.partition("| folder of `cog_triton/` |")[2].partition("\n\n")[0]
    folders = {path.parent.name for path in (ROOT / "cog_triton").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == folders


@pytest.mark.parametrize("page", ["architecture.md", "source.md"])
def test_files_named_on_a_page_of_the_code_exist(page: str) -> None:
    text = (DOCS / page).read_text("utf-8")
    files = {str(path) for path in (ROOT / "cog_triton").rglob("*.py")}
    files |= {
        str(path)
        for name in ("runner", "builder", "mock_cog_triton", "tests")
        for path in (ROOT / name).rglob("*.py")
    }
    for name in re.findall(r"[\w/]+\.py\b", text):
        assert any(file.endswith(f"/{name}") for file in files), name
