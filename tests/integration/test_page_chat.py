"""A chat on the page at `/` in a real browser: answers, Markdown, images, tool calls and errors."""

import pytest
from chromium import Chromium, Tab
from page_tabs import ENDED, IDLE, READY, answer, api, ask, browser, needs_chromium, tab
from scripted_api import BREAK, ScriptedAPI
from stack import wait_until

from cog_triton import errors

pytestmark = [pytest.mark.integration, pytest.mark.full, needs_chromium]
__all__ = ["api", "browser", "tab"]


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
