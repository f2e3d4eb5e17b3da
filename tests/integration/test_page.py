"""The page at `/` in a real browser, as a user has it: mouse, keyboard, phone, dark mode."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import chromium
import httpx
import pytest
from chromium import Chromium, Tab
from scripted_api import BREAK, ScriptedAPI, scripted
from stack import Stack, wait_until

from cog_triton import errors

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        chromium.find() is None,
        reason="no Chromium here: apt-get install chromium-headless-shell",
    ),
]

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


def test_an_answer_streams_and_the_next_one_knows_of_it(tab: Tab, api: ScriptedAPI) -> None:
    api.says("Paris", " is", None, " it.")
    ask(tab, "Capital of France?")
    tab.until("document.querySelector('.waits')?.innerText.includes('Paris is')")
    assert "TTFT" in tab.text(".foot")
    api.gate.set()
    assert answer(tab) == "Paris is it."
    assert "tokens/s" in tab.text(".foot")
    assert "37" in tab.text(".foot")
    assert "stop" in tab.text(".foot")
    assert tab.js("document.getElementById('said').textContent") == "Answer: Paris is it."
    ask(tab, "Sure?")
    wait_until(lambda: len(api.asked) == 2)
    assert api.asked[1][1]["messages"] == [
        {"role": "user", "content": "Capital of France?"},
        {"role": "assistant", "content": "Paris is it."},
        {"role": "user", "content": "Sure?"},
    ]


def test_what_a_model_writes_is_never_markup(tab: Tab, api: ScriptedAPI) -> None:
    evil = "<script>document.title='x'</script><img src=x onerror=\"document.title='x'\">&amp;"
    call = {"index": 0, "id": "c", "function": {"name": evil, "arguments": evil}}
    api.models[0]["id"] = evil
    api.says(
        evil, {"reasoning_content": evil}, {"tool_calls": [call]}, f"\n```{evil}\n{evil}\n```\n"
    )
    ask(tab, evil)
    tab.until(ENDED)
    assert tab.js("document.querySelector('article.model > .text').textContent").startswith(evil)
    assert tab.js("document.querySelector('.reason .text').textContent") == evil
    assert tab.js("document.querySelector('.calls').textContent") == f"{evil}({evil})"
    assert tab.js("document.querySelector('.text pre').textContent") == f"{evil}\n"
    assert tab.js("document.querySelectorAll('script').length") == 1
    assert tab.js("document.querySelectorAll('main img').length") == 0
    assert tab.js("document.title") == "cog-triton"


MARKDOWN = """# A *head*

Some **bold**, `co**de`, ~~no~~ and [a link](https://a.example/b_(c)), https://b.example/d_e.
snake_case_stays, 2 * 3 * 4, \\*plain\\*, [bad](javascript:alert(1)) ![far](https://c.example/i.png)

1. one
   - nested
2. two

| a | b |
|---|--:|
| 1 | `x|y` |

> quoted

---
```py
x = 1
```
"""
SHAPE = """(node => (function shape(n) {
  const own = [...n.childNodes].filter(c => c.nodeType === 1).map(shape).filter(Boolean).join(' ');
  return n.tagName.toLowerCase() + (own && `(${own})`);
})(node))(document.querySelector('article.model > .md'))"""


def test_an_answer_is_markdown_of_nodes(tab: Tab, api: ScriptedAPI) -> None:
    api.says(*MARKDOWN)  # a character at a time
    ask(tab)
    tab.until(ENDED)
    assert tab.js(SHAPE) == (
        "div(h3(em) p(strong code s a a span a) ol(li(p ul(li(p))) li(p))"
        " div(table(thead(tr(th th)) tbody(tr(td td td)))) blockquote(p) hr"
        " div(div(span button) pre(code)))"
    )
    said = tab.text("article.model > .md")
    for text in ("A head", "co**de", "snake_case_stays, 2 * 3 * 4, *plain*, bad far", "x = 1\n"):
        assert text in said
    links = "[...document.querySelectorAll('.md a')].map(a => a.href)"
    assert tab.js(links) == [
        "https://a.example/b_(c)",
        "https://b.example/d_e",
        "https://c.example/i.png",
    ]
    assert tab.js("document.querySelectorAll('.md img').length") == 0


def test_text_that_is_like_markdown_takes_no_long_time(tab: Tab, api: ScriptedAPI) -> None:
    pieces = (
        "*" * 3000,
        "`" * 3000,
        "[" * 3000,
        "> " * 3000,
        "- " * 3000,
        "_a" * 3000,
        "|-" * 3000,
    )
    api.says("\n\n".join(pieces), "\n\n".join(f"{piece}\n{piece}" for piece in pieces))
    ask(tab, "x")
    assert "aaa" not in answer(tab)


def test_a_question_is_changed_and_asked_again(tab: Tab, api: ScriptedAPI) -> None:
    for text, said in (("One?", "First."), ("Two?", "Second.")):
        api.says(said)
        ask(tab, text)
        answer(tab)
    api.says("Better.")
    tab.click("article.model:last-child .again")
    tab.until("document.querySelector('article.model:last-child .md').innerText === 'Better.'")
    first = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "First."}]
    assert api.asked[2][1]["messages"] == [*first, {"role": "user", "content": "Two?"}]
    tab.until(IDLE)
    tab.js("document.querySelector('.user .tools button').click()")
    tab.press("Escape")
    assert tab.text(".user .text") == "One?"
    tab.js("document.querySelector('.user .tools button').click()")
    tab.js("document.activeElement.select()")
    tab.type("Uno?")
    tab.press("Enter")
    tab.until("document.querySelectorAll('article').length === 2")
    assert answer(tab) == "Better."
    assert api.asked[3][1]["messages"] == [{"role": "user", "content": "Uno?"}]


def test_a_chat_outlives_a_reload(tab: Tab, api: ScriptedAPI) -> None:
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    api.says({"reasoning_content": "hm"}, "**Yes.**", {"tool_calls": [call]})
    tab.fill("#temperature", "0.5")
    ask(tab, "Sure?")
    tab.until(ENDED)
    reload = "window.old = true, location.reload()"
    tab.js(reload)
    tab.until(f"!window.old && {READY}")
    assert tab.text(".user .text") == "Sure?"
    assert tab.text(".md strong") == "Yes."
    assert tab.text(".calls") == "f({})"
    api.says("Half", None, "lost")
    ask(tab, "done")
    tab.until("document.querySelector('.waits')?.innerText.includes('Half')")
    tab.js(reload)
    tab.until(f"!window.old && {READY}")
    assert tab.text("article.model:last-child .md") == "Half"
    api.says("Good.")
    ask(tab, "And?")
    tab.until("document.querySelectorAll('article').length === 6")
    wait_until(lambda: len(api.asked) == 3)
    messages = api.asked[2][1]["messages"]
    assert [message["role"] for message in messages] == [
        *("user", "assistant", "tool", "assistant", "user"),
    ]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert api.asked[2][1]["temperature"] == 0.5
    tab.until(IDLE)
    tab.click("#new")
    tab.js(reload)
    tab.until(f"!window.old && {READY}")
    assert tab.js("document.querySelectorAll('article').length") == 0


def test_images_are_for_models_that_take_them(browser: Chromium, api: ScriptedAPI) -> None:
    api.models[1]["capabilities"] = {**api.models[1]["capabilities"], "images": 2}
    image = (
        "(async () => { const c = document.createElement('canvas'); c.width = WIDTH; c.height = 2;"
        " const blob = await new Promise(d => c.toBlob(d));"
        " await addImages([new File([blob], 'a.png', {type: 'image/png'})]) })()"
    )
    with browser.tab(api.url) as tab:
        tab.until(READY)
        assert not tab.js("$('attach').checkVisibility()")
        tab.js("$('model').selectedIndex = 1; $('model').dispatchEvent(new Event('change'))")
        assert tab.js("$('attach').checkVisibility()")
        for width in (3, 4000, 5):
            tab.js(image.replace("WIDTH", str(width)))
        assert tab.js("document.querySelectorAll('#held img').length") == 2
        tab.js("addImages([new File(['x'], 'x.png', {type: 'image/png'})])")
        api.says("Two.")
        ask(tab, "What?")
        answer(tab)
        text, small, large = api.asked[0][1]["messages"][0]["content"]
        assert text == {"type": "text", "text": "What?"}
        assert small["image_url"]["url"].startswith("data:image/png;base64,")
        assert large["image_url"]["url"].startswith("data:image/jpeg;base64,")
        assert tab.js("[...document.querySelectorAll('.user img')].map(i => i.naturalWidth)") == [
            3,
            1568,
        ]
        assert tab.js("document.querySelectorAll('#held img').length") == 0


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


def test_stop_closes_the_stream_and_keeps_what_came(tab: Tab, api: ScriptedAPI) -> None:
    for stop in (lambda: tab.click("#send"), lambda: tab.press("Escape")):
        api.left.clear()
        api.says("Some", " words", None)
        ask(tab)
        tab.until("document.querySelector('.waits')?.innerText.includes('words')")
        stop()
        assert answer(tab) == "Some words"
        assert api.left.wait(30)
        assert "Stopped." in tab.text("article.model:last-child")
        tab.click("#new")


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (errors.Overloaded("64 wait already"), ("E2107", "Try again in 1 s.")),
        (errors.TritonUnavailable("Triton restarts"), ("E2105", "restarting. Try again in 5 s.")),
        (errors.PromptTooLong("9000 tokens"), ("E1002", "new chat")),
        (errors.InvalidArgument("top_k=-7: too small"), ("E1005", "top_k", "settings")),
    ],
)
def test_errors_have_their_code_and_what_to_do(
    error: errors.CogTritonError, shown: tuple[str, ...], tab: Tab, api: ScriptedAPI
) -> None:
    api.error = error
    ask(tab)
    tab.until("document.querySelector('.error')")
    assert [part for part in shown if part not in tab.text(".error")] == []
    api.says("Now.")
    tab.click(".error button")
    assert answer(tab) == "Now."
    assert tab.js("document.querySelectorAll('article').length") == 2
    assert api.asked[-1][1]["messages"] == [{"role": "user", "content": "Hello"}]


def test_a_broken_stream_is_told_and_what_came_is_kept(tab: Tab, api: ScriptedAPI) -> None:
    tab.allowed += ("ERR_INCOMPLETE_CHUNKED_ENCODING",)
    for end, told in ((BREAK, "broke off"), (errors.TritonUnavailable("it died"), "E2105")):
        api.says("Half of", " it", None, end)
        ask(tab)
        tab.until("document.querySelector('.waits')?.innerText.includes('Half of it')")
        api.gate.set()
        assert answer(tab) == "Half of it"
        assert told in tab.text("article.model:last-child .error")
        tab.click("#new")


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


def test_a_call_is_shown_and_its_result_sent(tab: Tab, api: ScriptedAPI) -> None:
    start = {"index": 0, "id": "abc", "function": {"name": "weather", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": '{"city": "Oslo"}'}}
    api.says({"tool_calls": [start]}, {"tool_calls": [more]})
    ask(tab)
    tab.until(ENDED)
    assert tab.text(".calls") == 'weather({"city": "Oslo"})'
    api.error = errors.TritonUnavailable("once")
    ask(tab, "-3")
    tab.until("document.querySelector('.error')")
    api.says("Cold.")
    ask(tab, "-3")
    answer(tab)
    call, result = api.asked[2][1]["messages"][1:]
    assert call["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
    assert result == {"role": "tool", "tool_call_id": "abc", "content": "-3"}


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
