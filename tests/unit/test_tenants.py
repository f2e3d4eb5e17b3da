"""Tenants: their shares of the engine, their limits, and their metrics."""

from __future__ import annotations

import heapq
import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from cog_triton.engines.request import EngineRequest
from cog_triton.errors import InvalidArgument, Overloaded
from cog_triton.serving.admission import Admission
from cog_triton.serving.fair_queue import FairQueue
from cog_triton.serving.generation import GenerationRequest, GenerationResult
from cog_triton.serving.openai.error_responses import error_response
from cog_triton.serving.telemetry.observers import CompositeObserver
from cog_triton.serving.telemetry.tenant_metrics import MOST_TENANTS, OTHER, TenantMetrics
from cog_triton.serving.tenant_limits import TenantLimits
from cog_triton.serving.tenants import CURRENT, Tenant
from cog_triton.serving.ticket import Ticket
from cog_triton.settings import Settings
from cog_triton.text.sampling import SamplingParams

A, B, C = (Tenant(name=name, weight=weight) for name, weight in (("a", 1), ("b", 2), ("c", 4)))


@dataclass(eq=False)
class Stream(Ticket):
    begun: float = 0.0
    output: int = 100
    now: Callable[[], float] = float

    def __post_init__(self) -> None:
        self.made = self._made

    def _made(self) -> int:
        return min(self.output, round((self.now() - self.begun) * 100)) if self.begun else 0


@dataclass
class Engine:
    """A queue before an engine of `slots` streams of 100 tokens a second, in virtual time."""

    slots: int = 64
    prefill_s: float = 0.0001
    now: float = 0.0
    ends: list[tuple[float, int, str, Stream]] = field(default_factory=list)
    served: Counter[str] = field(default_factory=Counter)
    waits: dict[str, list[float]] = field(default_factory=dict)
    finished: Callable[[Stream], None] = lambda request: None

    def __post_init__(self) -> None:
        self.queue: FairQueue[Stream] = FairQueue(self.slots, lambda: self.now)
        self.numbers = itertools.count(1)

    def send(self, tenant: Tenant | None, prompt: int, output: int, priority: int = 0) -> Stream:
        request = Stream(tenant, priority, prompt, number=next(self.numbers), output=output)
        request.now = lambda: self.now
        self.queue.push(request)
        self.fill()
        return request

    def fill(self) -> None:
        while (request := self.queue.pop()) is not None:
            self.waits.setdefault(request.flow_name, []).append(self.now - request.arrived)
            first = self.now + request.prompt_tokens * self.prefill_s
            heapq.heappush(self.ends, (first, next(self.numbers), "first", request))

    def run(self, until: float) -> None:
        while self.ends and self.ends[0][0] <= until:
            self.now, _, what, request = heapq.heappop(self.ends)
            if what == "first":
                request.begun, request.prefilled = self.now, True
                end = self.now + request.output / 100
                heapq.heappush(self.ends, (end, next(self.numbers), "end", request))
            else:
                self.served[request.flow_name] += request.served
                self.queue.remove(request)
                self.finished(request)
            self.fill()
        self.now = until


def jain(values: list[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


@pytest.mark.parametrize("shapes", [{}, {"a": (4000, 20), "b": (10, 300), "c": (500, 100)}])
def test_tenants_in_overload_get_the_shares_of_their_weights(
    shapes: dict[str, tuple[int, int]],
) -> None:
    engine = Engine()
    tenants = {tenant.name: tenant for tenant in (A, B, C)}

    def again(request: Stream) -> None:
        engine.send(request.tenant, request.prompt_tokens, request.output)

    engine.finished = again
    for tenant in tenants.values():
        for _ in range(150):
            engine.send(tenant, *shapes.get(tenant.name, (500, 100)))
    engine.run(20)
    before = Counter(engine.served)
    engine.run(220)
    had = {name: engine.served[name] - before[name] for name in tenants}
    total = sum(had.values())
    for name, tenant in tenants.items():
        assert had[name] / total == pytest.approx(tenant.weight / 7, rel=0.05)
    assert jain([had[name] / tenants[name].weight for name in tenants]) >= 0.98


def test_a_flood_adds_little_to_who_asks_seldom() -> None:
    engine = Engine()
    engine.finished = lambda request: (
        engine.send(A, 4000, 200) and None if request.tenant is A else None
    )
    engine.send(B, 20, 50)
    for _ in range(200):
        engine.send(A, 4000, 200)
    for step in range(500):
        engine.run(0.2 * (step + 1))
        engine.send(B, 20, 50)
    waits = sorted(engine.waits["b"])
    assert waits[int(len(waits) * 0.99)] <= 4000 * engine.prefill_s + 0.01
    assert engine.served["a"] > 0
    assert max(engine.waits["a"]) < 600


def order(engine: Engine, requests: dict[str, Stream]) -> list[str]:
    found: list[str] = []
    engine.finished = lambda request: found.extend(
        name for name, each in requests.items() if each is request
    )
    engine.run(10_000)
    return found


def test_who_leaves_and_comes_back_has_the_debt_of_before() -> None:
    engine = Engine(slots=1)
    requests = {f"c{place}": engine.send(C, 100, 100) for place in range(30)}
    engine.send(A, 100_000, 1)
    engine.run(15)
    assert engine.served["a"] == 100_001
    left = [
        name for name, each in requests.items() if each in [*engine.queue, *engine.queue.running]
    ]
    requests["a"] = engine.send(A, 10, 1)
    assert len(left) > 20
    assert order(engine, requests) == [*left, "a"]


def test_tenants_that_left_are_forgotten() -> None:
    engine = Engine()
    for place in range(1000):
        engine.send(Tenant(name=f"t{place}"), 1, 1)
        engine.run(place + 1.0)
    assert len(engine.queue._flows) <= 64


def test_priority_goes_first_within_a_tenant_and_waiting_outweighs_it() -> None:
    engine = Engine(slots=1)
    engine.send(A, 1, 3000)
    requests = {"late": engine.send(A, 1, 100, priority=3), "plain": engine.send(A, 1, 100)}
    requests["urgent"] = engine.send(A, 1, 100, priority=-2)
    engine.run(29)
    requests["after 29 s"] = engine.send(A, 1, 100, priority=1)
    assert order(engine, requests) == ["urgent", "plain", "late", "after 29 s"]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=60))
def test_without_tenants_the_order_is_that_of_arrival(moves: list[tuple[int, int]]) -> None:
    queue: FairQueue[Ticket] = FairQueue(3, itertools.count().__next__)
    waiting: list[Ticket] = []
    running: list[Ticket] = []
    for number, (what, place) in enumerate(moves):
        if what == 0:
            waiting.append(Ticket(number=number))
            queue.push(waiting[-1])
        elif what == 1 and place < len(running):
            queue.remove(running.pop(place))
        elif what == 2 and place < len(waiting):
            queue.remove(waiting.pop(place))
        while len(running) < 3 and waiting:
            running.append(waiting.pop(0))
            assert queue.pop() is running[-1]
        assert queue.pop() is None
        assert (queue.waiting, len(queue.running)) == (len(waiting), len(running))
        assert list(queue) == waiting


def ticket_of(tenant: Tenant | None) -> Ticket:
    ticket = Ticket()
    ticket.tenant = tenant
    return ticket


def test_a_full_queue_is_of_one_tenant_and_says_when_to_come_back() -> None:
    admission = Admission(1, 2)
    tickets = [ticket_of(A) for _ in range(3)]
    for ticket in tickets:
        admission.enter(ticket, int)
    found: list[float] = []
    for _ in range(3):
        with pytest.raises(Overloaded) as caught:
            admission.enter(ticket_of(A), int)
        found.append(caught.value.retry_after)
    assert found == sorted(found)
    assert 1 <= found[0] <= found[-1] <= 120
    admission.enter(ticket_of(B), int)
    admission.require_room(1, B)
    with pytest.raises(Overloaded):
        admission.require_room(2, B)
    assert (admission.running, admission.waiting) == (1, 3)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def refused(limits: TenantLimits, tenant: Tenant) -> float:
    """Seconds that it is told to wait; 0 if it may begin."""
    try:
        limits.begin(tenant)
    except Overloaded as error:
        return error.retry_after
    return 0.0


def test_requests_of_a_minute_may_come_at_once_and_the_next_says_when() -> None:
    limits, tenant = TenantLimits(clock := Clock()), Tenant(name="a", requests_per_minute=6)
    assert [refused(limits, tenant) for _ in range(7)] == [0] * 6 + [10]
    clock.now = 9.0
    assert refused(limits, tenant) == pytest.approx(1)
    clock.now = 10.0
    assert [refused(limits, tenant) for _ in range(2)] == [0, 10]
    clock.now = 1e6
    assert [refused(limits, tenant) for _ in range(7)] == [0] * 6 + [10]
    assert refused(limits, Tenant(name="b", requests_per_minute=6)) == 0


def test_tokens_are_counted_as_they_are_used_and_debts_are_waited_for() -> None:
    limits, tenant = TenantLimits(clock := Clock()), Tenant(name="a", tokens_per_minute=600)
    assert refused(limits, tenant) == 0
    limits.used(tenant, 1000)
    assert refused(limits, tenant) == pytest.approx(40.1)
    with pytest.raises(Overloaded) as caught:
        limits.begin(tenant)
    assert "a may have 600 tokens a minute (tokens_per_minute of its key)" in str(caught.value)
    response = error_response(caught.value)
    assert (response.status_code, response.headers["retry-after"]) == (429, "41")
    clock.now = 40.1
    assert refused(limits, tenant) == 0


def test_answers_tell_what_is_left() -> None:
    limits = TenantLimits(clock := Clock())
    tenant = Tenant(name="a", requests_per_minute=6, tokens_per_minute=600)
    limits.begin(tenant)
    limits.used(tenant, 1000)
    clock.now = 5.0
    assert dict(limits.headers(tenant)) == {
        b"x-ratelimit-limit-requests": b"6",
        b"x-ratelimit-remaining-requests": b"5",
        b"x-ratelimit-reset-requests": b"5.0s",
        b"x-ratelimit-limit-tokens": b"600",
        b"x-ratelimit-remaining-tokens": b"0",
        b"x-ratelimit-reset-tokens": b"95.0s",
    }
    assert [*limits.headers(Tenant(name="b"))] == [*limits.headers(None)] == []


def test_so_many_run_or_wait_at_once() -> None:
    tenant = Tenant(name="a", concurrent=2)
    admission = Admission(1, 100)
    tickets = [Ticket() for _ in range(3)]
    for ticket in tickets:
        ticket.tenant = tenant
    for ticket in tickets[:2]:
        admission.enter(ticket, int)
    words = "1 requests of a run and 1 wait, no more than 2 may (concurrent of its key)"
    with pytest.raises(Overloaded, match=re.escape(words)):
        admission.enter(tickets[2], int)
    with pytest.raises(Overloaded):
        admission.require_room(1, tenant)
    admission.enter(Ticket(), int)
    admission.leave(tickets[0])
    admission.enter(tickets[2], int)


def asked(tenant: Tenant | None) -> GenerationRequest:
    asked = EngineRequest(input_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=2))
    return GenerationRequest(engine=asked, endpoint="chat", tenant=tenant)


DONE = GenerationResult(output_token_count=5, finish_reason="stop", queue_time=0.5, duration=2.0)


def series(registry: CollectorRegistry) -> dict[str, float]:
    return {
        f"{sample.name[18:]} {' '.join(sample.labels.values())}": sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.startswith("cog_triton_tenant_")
    }


def test_a_tenant_has_counters_and_a_field_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    told = CompositeObserver(Settings())
    caplog.set_level(logging.INFO, "cog_triton")
    tenant = Tenant(name="a")
    told.ended(asked(tenant), DONE, None)
    told.ended(asked(tenant), GenerationResult(duration=0.1), Overloaded("full"))
    told.ended(asked(tenant), GenerationResult(duration=3, cancelled=True), None)
    told.ended(asked(None), DONE, None)
    CURRENT.set(tenant)
    told.refused("chat", InvalidArgument("x"))
    CURRENT.set(None)
    told.refused("chat", InvalidArgument("x"))
    assert series(told.metrics.registry) == {
        "requests_total a stop": 1,
        "requests_total a cancelled": 1,
        "refused_total a E2107": 1,
        "refused_total a E1005": 1,
        "prompt_tokens_total a": 3,
        "generation_tokens_total a": 5,
        "queue_seconds_total a": 3.5,
        "engine_seconds_total a": 1.5,
    }
    logged = [record.values.get("tenant") for record in caplog.records]  # type: ignore[attr-defined]
    assert logged == ["a", "a", "a", None, "a", None]


def test_labels_are_bounded() -> None:
    metrics = TenantMetrics(registry := CollectorRegistry())
    for place in range(MOST_TENANTS + 50):
        metrics.refused(Tenant(name=f"t{place}"), "E2107")
    metrics.refused(Tenant(name="t0"), "E2107")
    found = series(registry)
    assert len(found) == MOST_TENANTS + 1
    assert found[f"refused_total {OTHER} E2107"] == 50
    assert found["refused_total t0 E2107"] == 2
