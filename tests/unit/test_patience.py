"""No test compares a time with less than 10 s: what is late on a busy machine is not wrong."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import httpx

TESTS = Path(__file__).parents[1]
DIRECTORIES = ("unit", "process", "integration", "kills", "tools", "deploy", "stores")
LEAST_S = 10
WAITS = {"acquire", "communicate", "create_connection", "exception", "join", "result"}
WAITS |= {"settimeout", "wait", "wait_for", "wait_until"}
CONSTANT = re.compile("(PATIENCE|FREED|GONE|WAIT)_S")
CLOCK = re.compile(r"\.(monotonic|perf_counter|process_time|thread_time)\(\)")
ALLOWED = {
    "openai_server.py: deadline.wait(": "between two looks",
    "test_hostile_keys_and_tls.py: raw.settimeout(": "its expiry is caught: it sends slowly",
    "test_images.py: refusal(": "its expiry is the subject",
    "test_large_bodies.py: bodies._child": "its expiry is the subject",
    "test_long_steps.py: wait(": "a look at what is ready",
    "test_replicas.py: asyncio.wait(": "nothing may happen",
    "test_step_stream.py: connected(": "its expiry is the subject",
    "test_template_process.py: stopped.connection": "its expiry is the subject",
}
"""Places where a small number is meant, by file and the beginning of their source: why."""


def is_impatient(node: ast.AST) -> bool:
    """Whether the node waits less than 10 s, or compares a time with less."""
    clock, numbers = "", list[ast.AST]()
    match node:
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=given):
            words = [word.value for word in node.keywords if word.arg == "timeout"]
            clock, numbers = ".monotonic()", [*words, *(given[-1:] if name in WAITS else ())]
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if CONSTANT.search(name):
            clock, numbers = ".monotonic()", [value]
        case ast.BinOp(left, ast.Add(), right) | ast.Compare(left, [ast.Lt() | ast.LtE()], [right]):
            clock, numbers = ast.unparse(left), [right]
    values = [one.value for one in numbers if isinstance(one, ast.Constant)]
    small = [one for one in values if type(one) in (int, float) and one < LEAST_S]  # type: ignore[operator]
    return bool(small and CLOCK.search(clock))


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those of waits that must end for nothing, as `not` or pytest.raises says."""
    if isinstance(node, ast.UnaryOp | ast.With):
        said = ast.unparse(node).partition("\n")[0]
        if re.match(r"not |with pytest\.raises\(.*Timeout", said):
            return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from nodes(child)


def test_no_test_is_impatient() -> None:
    places = ("*.py", *(f"{name}/**/*.py" for name in DIRECTORIES))
    found = {
        f"{path.relative_to(TESTS)}:{node.lineno}": f"{path.name}: {ast.unparse(node)}"  # type: ignore[attr-defined]
        for path in (path for place in places for path in TESTS.glob(place))
        for node in nodes(ast.parse(path.read_text("utf-8")))
        if is_impatient(node)
    }
    hasty = [one for one in found.items() if not one[1].startswith((*ALLOWED,))]
    assert hasty == [], "wait a minute for the event, or say in ALLOWED why the time is meant"
    assert [one for one in ALLOWED if not any(x.startswith(one) for x in found.values())] == []


def test_requests_of_httpx_wait_a_minute() -> None:
    default = (httpx.get.__kwdefaults__ or {})["timeout"]
    assert default == httpx.Client().timeout == httpx.AsyncClient().timeout == httpx.Timeout(60)
