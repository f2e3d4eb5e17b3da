"""Tabs of a real browser with the page at `/`, which asks a scripted API."""

from collections.abc import Iterator

import chromium
import pytest
from chromium import Chromium, Tab
from scripted_api import ScriptedAPI, scripted

needs_chromium = pytest.mark.skipif(
    chromium.find() is None,
    reason="no Chromium here: apt-get install chromium-headless-shell",
)

KEY = "a-key-for-this-test"
IDLE = "document.getElementById('send').textContent === 'Send'"
ENDED = f"document.querySelector('.request') && {IDLE}"
READY = "document.getElementById('state')?.textContent === 'ready'"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    program = chromium.find()
    assert program
    running = Chromium(program, tmp_path_factory.mktemp("profile"))
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
def api() -> Iterator[ScriptedAPI]:
    with scripted() as found:
        yield found


@pytest.fixture
def tab(browser: Chromium, api: ScriptedAPI) -> Iterator[Tab]:
    with browser.tab(api.url) as found:
        found.until(READY)
        yield found


def ask(tab: Tab, text: str = "Hello") -> None:
    tab.fill("#prompt", text)
    tab.press("Enter")


def answer(tab: Tab) -> str:
    tab.until(ENDED)
    return tab.text("article.model:last-child .text")
