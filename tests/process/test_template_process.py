"""Chat templates that run on or make too much are stopped, and others go on being rendered."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cog_triton.errors import BadMessages, TritonTokenizerError
from cog_triton.ipc.child import PythonChild
from cog_triton.text.chat_template import TemplatePool, TemplateRefused

CPU_S = 0.3
MEMORY_BYTES = 64 << 20
GOOD = "{% for message in messages %}[{{ message.content }}]{% endfor %}"

ENDLESS = {
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "macros that call two": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
    "{% endmacro %}{{ m(60) }}",
    "a power": "{{ (10 ** 9) ** (10 ** 6) }}",
}
TOO_MUCH = {
    "a wide number": "{{ '%1000000000d' % 1 }}",
    "string multiplication": "{{ 'a' * 10 ** 9 }}",
    "concatenation that doubles": "{% set ns = namespace(a='a') %}{% for i in range(40) %}"
    "{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "a join": "{{ range(99999) | join('a' * 99999) }}",
    "nested lists as JSON": "{% set ns = namespace(a=['a']) %}{% for i in range(40) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a | tojson }}",
    "output in a loop": "{% set a = 'a' * 10000 %}{% for i in range(9999) %}{{ a }}{% endfor %}",
    "a macro's output": "{% macro m() %}{% set a = 'a' * 99999 %}{% for i in range(99999) %}{{ a }}"
    "{% endfor %}{% endmacro %}{{ m() | length }}",
}


@pytest.fixture(scope="module")
def pool() -> Iterator[TemplatePool]:
    made = TemplatePool(CPU_S, MEMORY_BYTES)
    yield made
    made.close()


def render(pool: TemplatePool, source: str, content: str = "Hi") -> str:
    return pool.render(source, {"messages": [{"role": "user", "content": content}]})


def first(pool: TemplatePool) -> PythonChild:
    child = pool.places[0].child
    assert child is not None
    return child


def stopped(pool: TemplatePool) -> None:
    with pytest.raises(BadMessages, match=r"E1006.*exceeds its limits: more than 0.3 s of CPU"):
        render(pool, ENDLESS["nested ranges"])


@pytest.mark.parametrize("attack", ENDLESS | TOO_MUCH)
def test_a_template_that_runs_long_or_makes_too_much_is_stopped(
    pool: TemplatePool, attack: str
) -> None:
    most = "0.3 s of CPU" if attack in ENDLESS else ""
    with pytest.raises(BadMessages, match=f"E1006.*exceeds its limits: more than {most}"):
        render(pool, (ENDLESS | TOO_MUCH)[attack])
    assert render(pool, GOOD) == "[Hi]"


def test_endless_recursion_fails(pool: TemplatePool) -> None:
    with pytest.raises(TemplateRefused, match="RecursionError"):
        render(pool, "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")


def test_kinds_of_errors_are_told_apart(pool: TemplatePool) -> None:
    with pytest.raises(TemplateRefused, match="refuses the messages: no"):
        render(pool, "{{ raise_exception('no') }}")
    with pytest.raises(TemplateRefused, match=r"fails: ZeroDivisionError"):
        render(pool, "{{ 1 / 0 }}")
    with pytest.raises(TritonTokenizerError, match="broken: line 1"):
        render(pool, "{% if %}")
    with pytest.raises(TemplateRefused) as caught:
        render(pool, "{{ raise_exception('a' * 99999) }}")
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize("content", ["é日🦙\0", "\ud83e", "日" * 1_000_000])
def test_text_comes_back_as_it_went(pool: TemplatePool, content: str) -> None:
    assert render(pool, GOOD, content) == f"[{content}]"


def test_many_at_once_each_get_their_own(pool: TemplatePool) -> None:
    got: dict[int, str] = {}

    def ask(number: int) -> None:
        got[number] = render(pool, GOOD, str(number))

    threads = [threading.Thread(target=ask, args=[number]) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {number: f"[{number}]" for number in range(64)}


def test_a_slow_template_does_not_stop_others(pool: TemplatePool) -> None:
    pool.close()
    slow = threading.Thread(target=stopped, args=[pool])
    slow.start()
    while pool.places[0].child is None:
        pass
    assert render(pool, GOOD) == "[Hi]"
    slow.join()
    assert [place.child is None for place in pool.places] == [True, False]


def test_a_child_that_died_is_replaced(pool: TemplatePool) -> None:
    render(pool, GOOD)
    child = first(pool)
    os.kill(child.process.pid, signal.SIGKILL)
    child.process.wait()
    assert render(pool, GOOD) == "[Hi]"


def test_a_child_that_does_not_answer_is_killed(pool: TemplatePool) -> None:
    pool.close()
    pool.warm_up()
    stopped = first(pool)
    stopped.connection.settimeout(0.2)
    os.kill(stopped.process.pid, signal.SIGSTOP)
    with pytest.raises(BadMessages, match="no answer"):
        render(pool, GOOD)
    assert stopped.process.returncode == -signal.SIGKILL
    assert render(pool, GOOD) == "[Hi]"


def test_a_child_has_no_secrets_and_ends_with_its_parent(
    pool: TemplatePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.close()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    pool.warm_up()
    child = first(pool)
    assert b"secret" not in Path(f"/proc/{child.process.pid}/environ").read_bytes()
    child.connection.close()
    assert child.process.wait(60) == 0
