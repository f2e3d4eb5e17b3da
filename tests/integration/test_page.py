"""The page at `/` in a real browser: its policy, key, settings, keyboard, phone, dark mode."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from chromium import Chromium, Tab
from page_tabs import KEY, READY, answer, api, ask, browser, needs_chromium, tab
from scripted_api import ScriptedAPI, scripted
from stack import Stack, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.full, needs_chromium]
__all__ = ["api", "browser", "tab"]


def test_the_policy_forbids_scripts_markup_and_other_hosts(
    browser: Chromium, api: ScriptedAPI
) -> None:
    with browser.tab(api.url) as tab:
        tab.until(READY)
        tab.allowed += ("Content Security Policy", "Trusted", "inline script", "violates")
        assert (
            tab.js("try { document.body.innerHTML = 'x'; 'set' } catch { 'refused' }") == "refused"
        )
        assert (
            tab.js("fetch('http://localhost:9/').then(() => 'sent', () => 'refused')") == "refused"
        )
        tab.js(
            "(s => { s.append(\"document.title='x'\"); document.body.append(s); })"
            "(document.createElement('script'))"
        )
        assert tab.js("document.title") == "cog-triton"
        assert tab.js("document.cookie") == ""


def test_a_key_is_asked_for_and_kept_for_the_tab(browser: Chromium) -> None:
    with scripted(KEY) as api, browser.tab(api.url) as tab:
        tab.until("document.getElementById('lock').open")
        tab.type("wrong")
        tab.press("Enter")
        tab.until("document.getElementById('refused').textContent.includes('does not take')")
        tab.type(KEY)
        tab.press("Enter")
        tab.until(READY)
        api.says("Open.")
        ask(tab)
        assert answer(tab) == "Open."
        tab.click(".request summary")
        assert KEY not in tab.text("main")
        assert "$COG_TRITON_API_KEY" in tab.text(".request pre")
        assert tab.js("[sessionStorage['cog-triton-key'], localStorage.length]") == [KEY, 0]
        tab.js("window.old = true, location.reload()")
        tab.until(f"!window.old && {READY}")
        assert not tab.js("document.getElementById('lock').open")


def test_all_of_it_works_by_keyboard(tab: Tab, api: ScriptedAPI) -> None:
    assert tab.js("document.activeElement.id") == "prompt"
    api.says("One", None, " two.")
    tab.type("a")
    tab.press("Enter", shift=True)
    tab.type("b")
    tab.press("Tab")
    tab.press("Enter")
    tab.until("document.querySelector('.waits')?.innerText.includes('One')")
    assert tab.js("document.activeElement.id") == "send"
    api.gate.set()
    assert answer(tab) == "One two."
    assert api.asked[0][1]["messages"][0]["content"] == "a\nb"
    reached = set()
    for _ in range(40):
        tab.press("Tab")
        reached.add(
            tab.js(
                "(e => e.id || e.closest('[class]')?.className + ' ' + e.tagName)"
                "(document.activeElement)"
            )
        )
    wanted = {"new", "model", "system", "temperature", "seed", "prompt", "send", "request SUMMARY"}
    assert wanted <= reached


def test_fields_show_the_defaults_of_the_model(browser: Chromium, api: ScriptedAPI) -> None:
    api.models[1]["generation_config"] = {"temperature": 0.6, "top_k": 20, "min_p": 0.1}
    shown = "['temperature', 'top_p', 'top_k', 'repetition_penalty'].map(id => $(id).placeholder)"
    with browser.tab(api.url) as tab:
        tab.until(READY)
        assert tab.js(shown) == ["1", "1", "off", "1"]
        tab.js("$('model').selectedIndex = 1; $('model').dispatchEvent(new Event('change'))")
        assert tab.js(shown) == ["0.6", "1", "20", "1"]


def test_settings_reach_the_request(tab: Tab, api: ScriptedAPI) -> None:
    api.says("Yes.")
    tab.fill("#temperature", "0.5")
    tab.fill("#max_tokens", "7")
    tab.fill("#system", "Be brief.")
    tab.click("#rest summary")
    tab.fill("#stop", "\n\nEND")
    tab.fill("#more", "{")
    ask(tab)
    tab.until("document.getElementById('wrong').textContent")
    assert api.asked == []
    tab.fill("#more", '{"min_p": 0.1}')
    tab.js("document.getElementById('model').selectedIndex = 1")
    ask(tab)
    answer(tab)
    path, body = api.asked[0]
    assert path == "/v1/chat/completions"
    assert body.pop("stream_options")
    assert body == {
        "model": "sql-adapter",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
        ],
        "temperature": 0.5,
        "max_tokens": 7,
        "stop": ["END"],
        "min_p": 0.1,
        "stream": True,
    }
    tab.click("[name=template][value=own]")
    tab.fill("#template", "[{system_prompt}] {prompt}")
    ask(tab, "{system_prompt}?")
    wait_until(lambda: len(api.asked) == 2)
    assert api.asked[1][0] == "/v1/completions"
    assert api.asked[1][1]["prompt"] == "[Be brief.] {system_prompt}?"


@pytest.mark.parametrize("width", [320, 390])
def test_nothing_scrolls_sideways_on_a_phone(
    width: int, browser: Chromium, api: ScriptedAPI
) -> None:
    wide = "document.scrollingElement.scrollWidth > innerWidth"
    with browser.tab(api.url, width=width, height=700) as tab:
        tab.until(READY)
        assert not tab.js(wide)
        api.says("x" * 300, f"\n```\n{'y' * 300}\n```\n")
        ask(tab, "z" * 300)
        answer(tab)
        tab.click(".request summary")
        assert not tab.js(wide)
        assert not tab.js("document.getElementById('scroll').scrollWidth > innerWidth")
        tab.click("#toggle")
        tab.until("document.getElementById('temperature').checkVisibility()")
        assert not tab.js(wide)


@pytest.mark.parametrize("dark", [False, True])
def test_colours_follow_the_system(dark: bool, browser: Chromium, api: ScriptedAPI) -> None:
    with browser.tab(api.url, dark=dark) as tab:
        shade = tab.js("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
        assert (int(shade) < 128) is dark


@pytest.fixture(scope="module")
def mock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("page"), None, COG_TRITON_API_KEY=KEY, METRICS_PUBLIC="1")
    stack.command += ["--engine", "mock", "--tps", "50"]
    with stack.served():
        yield stack


def test_a_real_server_behind_its_door(mock: Stack, browser: Chromium, tmp_path: Path) -> None:
    locked = {"Authorization": f"Bearer {KEY}"}
    page = httpx.get(f"{mock.own}/")
    assert page.headers["referrer-policy"] == "no-referrer"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "set-cookie" not in page.headers
    assert len(gzip.compress(page.content)) < 60_000
    assert httpx.get(f"{mock.own}/v1/models").status_code == 401
    assert httpx.get(mock.url, headers=locked).json()["page_url"] == f"{mock.own}/"
    with browser.tab(mock.own) as tab:
        tab.until("document.getElementById('lock').open")
        tab.type(KEY)
        tab.press("Enter")
        tab.until(READY)
        tab.fill("#max_tokens", "12")
        ask(tab)
        said = answer(tab)
        assert said
        assert "12 tokens" in tab.text(".foot")
        tab.until("document.getElementById('metrics').innerText.includes('Tokens out\\n12')")

        tab.click(".request summary")
        environment = {**os.environ, "COG_TRITON_API_KEY": KEY, "NO_PROXY": "*"}
        curl = ["bash", "-c", tab.text(".request pre")]
        told = subprocess.run(curl, env=environment, capture_output=True, text=True, check=True)
        deltas = [
            json.loads(line[6:])["choices"][0]["delta"].get("content", "")
            for line in told.stdout.splitlines()
            if line.startswith("data: {")
        ]
        assert "".join(deltas) == said
        tab.click(".request nav button:nth-child(2)")
        script = tmp_path / "asked.py"
        script.write_text(tab.text(".request pre"))
        again = subprocess.run(
            [sys.executable, script], env=environment, capture_output=True, text=True, check=True
        )
        assert again.stdout.rstrip("\n") == said.rstrip("\n")

        tab.fill("#max_tokens", "2000")
        ask(tab)
        wait_until(lambda: mock.engine_requests() == 1)
        tab.press("Escape")
        wait_until(lambda: mock.engine_requests() == 0)
