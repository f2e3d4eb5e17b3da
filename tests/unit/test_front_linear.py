"""What the front does to bytes of clients is linear in their number, and never long at once.

CPU time of the thread is measured, not wall time, and the best of some runs counts.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import pkgutil
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import small_front
from small_front import PassGate, Wire, on_loop, route_to

import cog_triton.front
from cog_triton.errors import InvalidArgument
from cog_triton.front.access import Access
from cog_triton.front.json_body import JSONLimits, Numbers, require_bounded
from cog_triton.front.large_bodies import LARGE, LargeBodies
from cog_triton.front.message import Forward, Limits, Refused, Request

Pattern = re.Pattern[Any]
PARTS = 8
MOST_RATIO = 20
"""CPU time at a size by that at an eighth of it."""
MEMORY_S = 0.010
"""What pages and caches may cost beside."""
LEAST_S = 0.002
"""Shorter runs are noise, and harmless."""
TRIES = 15
"""Measurements before a body is called slow: another process may have the caches."""
LOOP_PARSES = 12
"""CPU time of the event loop that one request may hold at once, in parses of 64 KB of JSON."""
JSON_BODY = b"[" + b"1," * (32 << 10) + b"1]"
RECEIVED = 256 << 10
"""Bytes that a transport reads at once."""

# Each byte, and the beginnings and separators of what the patterns look for.
UNITS = [
    *(bytes([byte]) for byte in range(256)),
    *(rb"\"", rb"\\", b'""', b'"a"a', b'aa"aa"', rb'"\"', rb'\\"', rb"\u005c", b'"a\\', b'\\"a'),
    *(b"[[", b"[]", b"{}", b'{"a":', b"[1,", b"[1],", b"[1", b"1,", b"1.5e-3,", b"]1[", b"}{"),
    *(b"key '", b"key 'a", b"'a", b"cog_triton_1", b"triton_python_backend_shm", b"E1005", b" E1"),
    b"e1",
    *(b"a:", b"a/", b"a ", b" a", b"a.", b"a@", b"a:1", b"://", b"http://", b"@a", b"A ", b"Ab "),
    *(b"0\r\n", b"1\r\na\r\n", b"event: completed\n", b'event: completed\ndata: {"error":"'),
    *(b"Prediction failed: ", b"Prediction failed: Aa bb cc: ", b"Worker crashed", b"Aa aa"),
    *(b"/v2/models/", b"/versions/1", b"POST ", b"/predictions/", b"HTTP/1.1 ", b"GET a HTTP/1.1"),
]
STARTS = [b"", b'"', b"[" * 65 + b'"', b"[", b"key '", b"http://", b"GET ", b"[a", b'{"error":"']


def modules() -> list[ModuleType]:
    """The front's own, and what they import from the package."""
    own = [
        importlib.import_module(f"{cog_triton.front.__name__}.{found.name}")
        for found in pkgutil.iter_modules(cog_triton.front.__path__)
    ]
    names = {
        value.__module__
        for module in own
        for value in vars(module).values()
        if isinstance(getattr(value, "__module__", None), str)
        and value.__module__.startswith("cog_triton.")
    }
    return [*own, *(importlib.import_module(name) for name in sorted(names))]


def patterns() -> dict[str, Pattern]:
    """Every compiled pattern of those modules, once, by a name that tells where it is."""

    def within(name: str, value: Any) -> Iterator[tuple[str, Pattern]]:
        if isinstance(value, re.Pattern):
            yield name, value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                yield from within(f"{name}[{key!r}]", item)
        elif isinstance(value, tuple | list | set | frozenset):
            for place, item in enumerate(value):
                yield from within(f"{name}[{place}]", item)
        elif isinstance(value, type):
            members = value if issubclass(value, Enum) else ()
            found = {**vars(value), **{one.name: one.value for one in members}}
            for key, item in found.items():
                if isinstance(item, re.Pattern | tuple):
                    yield from within(f"{name}.{key}", item)

    found: dict[Pattern, str] = {}
    for module in modules():
        short = module.__name__.removeprefix("cog_triton.")
        for key, value in tuple(vars(module).items()):
            for name, pattern in within(f"{short}.{key}", value):
                found.setdefault(pattern, name)
    return {name: pattern for pattern, name in found.items()}


PATTERNS = patterns()


def cpu_s(function: Callable[[], object]) -> float:
    started = time.thread_time()
    function()
    return time.thread_time() - started


def require_linear(
    name: str, function: Callable[[bytes], object], body: bytes, part: bytes | None = None
) -> None:
    """At most 20 times the time of an eighth of it, as a quadratic one takes 64 times.

    A byte may cost 2.5 times as much in the larger body, which caches do not hold. What is too
    fast to measure passes.
    """
    part = body[: len(body) // PARTS] if part is None else part
    best = best_part = float("inf")
    for _ in range(TRIES):
        best = min(best, cpu_s(lambda: function(body)))
        if best < LEAST_S:
            return
        best_part = min(best_part, cpu_s(lambda: function(part)))
        if best <= MOST_RATIO * best_part + MEMORY_S:
            return
    times = f"{best / best_part:.1f} times that of an eighth of it"
    pytest.fail(f"{name}: {best:.3f} s for {body[:40]!r}...: {times}")


def require_brief(what: bytes, held: Callable[[], float]) -> None:
    """At most the CPU time of LOOP_PARSES parses of 64 KB of JSON, measured beside it."""
    for _ in range(TRIES):
        if (took := held()) < LEAST_S:
            return
        allowed = LOOP_PARSES * cpu_s(lambda: json.loads(JSON_BODY))
        if took < allowed:
            return
    pytest.fail(f"{took:.3f} s of {allowed:.3f} s for {what[:60]!r}..., {len(what)} bytes")


def inputs(size: int) -> Iterator[bytes]:
    for place, start in enumerate(STARTS):
        for unit in UNITS if place < 2 else UNITS[256:]:
            yield start + unit * (size // len(unit))
    for unit in UNITS[256:]:  # nested, and closed at the end
        yield b"[" * (size // 3) + unit * (size // 3 // len(unit)) + b"]" * (size // 3)


def applied(name: str, pattern: Pattern) -> Callable[[bytes], object]:
    """The ways in which the front's modules use a pattern; all, if they do not name it."""
    called = rf"\b{name.rpartition('.')[2]}\.(\w+)"
    sources = (Path(str(module.__file__)).read_text("utf-8") for module in modules())
    ways = {way for source in sources for way in re.findall(called, source)}
    anchored = bool(ways) and ways <= {"match", "fullmatch"}

    def all_ways(body: bytes) -> None:
        text: Any = body if isinstance(pattern.pattern, bytes) else body.decode("latin-1")
        pattern.match(text)
        pattern.fullmatch(text)
        for _ in () if anchored else pattern.finditer(text):
            pass

    return all_ways


@pytest.mark.parametrize("name", PATTERNS)
def test_no_pattern_backtracks(name: str) -> None:
    function = applied(name, PATTERNS[name])
    for body in inputs(4 << 10):
        require_linear(name, function, body)


@pytest.mark.parametrize("numbers", Numbers)
def test_bounds_of_json_are_found_in_linear_time(numbers: Numbers) -> None:
    def bounded(body: bytes) -> None:
        with suppress(InvalidArgument):
            require_bounded(body, JSONLimits(numbers=numbers))

    size = Limits().body_bytes
    deep = b"[" * 60 + b"%b" + b"]" * 60
    worst = deep % (b"[1]" * (size // 3)), deep % (b"[1]" * (size // 3 // PARTS))
    require_linear("deep", bounded, *worst)
    size //= 8  # the others are as linear in less time
    for unit in (b'"', rb"\"", b"[1],", b"1,", b"]", b"e"):
        require_linear("require_bounded", bounded, unit * (size // len(unit)))
    for unit in (rb"\"", rb"\\", b'aa"aa"'):
        require_linear("require_bounded", bounded, b'"' + unit * (size // len(unit)))


@pytest.mark.parametrize("port", ["cog", "openai", "triton", "infer"])
def test_no_body_holds_the_event_loop(port: str) -> None:
    """Of those below the size from which on they are for another process."""
    path, gate = gates()[port]
    for body in [*bodies(LARGE - 1), *crafted(LARGE - 1)]:
        request = Request("POST", path, [], body)
        require_brief(body, lambda request=request: held_s(gate, request))


def fed() -> Iterator[bytes]:
    """What a transport may read at once, of one request or of many."""
    chunked = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
    long = b"POST / HTTP/1.1\r\ncontent-length: 8000000\r\n\r\n"
    upgrade = b"GET / HTTP/1.1\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"
    get = b"GET / HTTP/1.1\r\n"
    for start, unit in (
        (b"", get + b"\r\n"),
        (b"", upgrade),
        (b"", upgrade[:-2] + b"a: b\r\n" * 90 + b"\r\n"),
        (b"", b"\r\n"),
        (chunked, b"1\r\na\r\n"),
        (chunked, b"1;a=b\r\na\r\n"),
        (chunked, b"10\r\n" + b"a" * 16 + b"\r\n"),
        (chunked + b"0\r\n", b"a:b\r\n"),
        (long, b"a"),
        (get, b"a:\r\n"),
        (get, b"a:" + b"b" * 300 + b"\r\n"),
        (b"GET /", b"a"),
        (get + b"a: ", b"b"),
    ):
        yield (start + unit * (RECEIVED // len(unit)))[:RECEIVED]


@on_loop
async def test_no_bytes_that_arrive_hold_the_event_loop() -> None:
    def feed(data: bytes) -> None:
        wire = Wire(PassGate(), Limits())
        wire.feed(data)
        wire.close()

    for data in fed():
        require_brief(data, lambda data=data: cpu_s(lambda: feed(data)))
        require_linear("feed", feed, data)
        await asyncio.sleep(0)


def gates() -> dict[str, tuple[bytes, Any]]:
    """Each port's way in, and its gate; a large body has no process to go to."""

    class Here(LargeBodies):
        async def run(self, size: int, function: Any, *arguments: object) -> Any:
            assert size < LARGE or function.__name__ == "inflated"
            return function(*arguments)

    route = route_to(status="READY")
    names = "prompt messages system_prompt max_tokens min_tokens temperature top_p top_k seed"
    names += " stop_sequences presence_penalty repetition_penalty prompt_template return_token_ids"
    route[0].state._inputs = frozenset(names.split())
    found = small_front.gates(route, Access(None, loopback=True), Here())
    return {
        "cog": (b"/predictions", found["cog"]),
        "openai": (b"/v1/chat/completions", found["openai"]),
        "triton": (b"/v2/models/m/generate", found["triton"]),
        "infer": (b"/v2/models/m/infer", found["triton"]),
    }


def held_s(gate: Any, request: Request) -> float:
    """CPU time of the loop's thread for a decision, and for what is written on."""

    async def decide() -> None:
        try:
            found = await gate.decide(request)
        except Refused as refused:
            found = gate.refusal(refused.status, refused.error)
        if isinstance(found, Forward):
            found.encoded()

    loop = asyncio.new_event_loop()
    try:
        return cpu_s(lambda: loop.run_until_complete(decide()))
    finally:
        loop.close()


def bodies(size: int) -> Iterator[bytes]:
    """Bodies of adversarial units, bare and as values of what the ports take."""
    for start in (b"", b'"', b"[" * 65 + b'"', b'{"input":{"prompt":"', b'{"a":['):
        for unit in UNITS[256:]:
            yield (start + unit * (size // len(unit)))[:size]
        for unit in (b'"', b"\\", b"[", b"]", b"{", b",", b"0", b"9", b"e", b"\xff", b" ", b"a"):
            yield (start + unit * size)[:size]


def crafted(size: int) -> Iterator[bytes]:
    """JSON that is whole, with as much in it as fits."""

    def filled(start: str, item: Callable[[int], str], end: str) -> bytes:
        found, room = [], size - len(start) - len(end)
        for number in range(1 << 20):
            found.append(item(number))
            room -= len(found[-1]) + 1
            if room < 0:
                break
        return (start + ",".join(found[:-1]) + end).encode()

    for start, end in (("{", "}"), ('{"input":{', "}}"), ('{"parameters":{', "}}")):
        yield filled(start, lambda i: f'"a{i}":1', end)
        yield filled(start, lambda i: f'"b{i}":[{{"c":[]}}]', end)
        # Words of all letters of known ones, in another order: the worst for difflib.
        for word in ("snekot_xam_xam", "ytlanep_noititeper"):
            yield filled(start, lambda i, w=word: f'"{w}{i % 97}{w[i % 11 :]}":1', end)  # type: ignore[misc]
    items = ("1", "[]", '""', "[[1]]", "1e-9", '{"name":"a"}', "9" * 4000)
    for start, end in (
        ('{"input":{"messages":[', "]}}"),
        *((f'{{"{name}":[', "]}") for name in ("messages", "input_ids", "webhook", "inputs")),
        ('{"inputs":[{"name":"input_ids","datatype":"INT32","shape":[9],"data":[', "]}]}"),
    ):
        for text in items:
            yield filled(start, lambda _, text=text: text, end)  # type: ignore[misc]
    for key in (b"webhook", b"input", b"id", b"text_input"):
        yield b'{"%b":"%b"}' % (key, rb"\u0041" * (size // 8))
    yield json.dumps({"webhook": "http://" + "a" * (size - 100) + "@"}).encode()
    yield json.dumps({"webhook": "http://127.0.0.1/" + "a:" * (size // 3)}).encode()
