"""Fair queue: shares by weight, no credit for the idle, priorities, reserves, one tenant."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.errors import Overloaded
from cog_triton.serving.admission import Admission
from cog_triton.serving.fair_queue import PREFILL_TOKENS, FairQueue
from cog_triton.serving.tenants import Tenant
from cog_triton.serving.ticket import Ticket

A, B, C = (Tenant(name=name, weight=weight) for name, weight in (("a", 1), ("b", 2), ("c", 4)))


@dataclass(eq=False)
class Request(Ticket):
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
    ends: list[tuple[float, int, str, Request]] = field(default_factory=list)
    served: Counter[str] = field(default_factory=Counter)
    waits: dict[str, list[float]] = field(default_factory=dict)
    finished: Callable[[Request], None] = lambda request: None

    def __post_init__(self) -> None:
        self.queue: FairQueue[Request] = FairQueue(self.slots, lambda: self.now)
        self.numbers = itertools.count(1)

    def send(self, tenant: Tenant | None, prompt: int, output: int, priority: int = 0) -> Request:
        request = Request(tenant, priority, prompt, number=next(self.numbers), output=output)
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

    def again(request: Request) -> None:
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


def test_without_one_who_asks_seldom_a_flood_has_the_whole_engine() -> None:
    for tenant in (A, None):
        engine = Engine()
        for _ in range(200):
            engine.send(tenant, 4000, 200)
        assert len(engine.queue.running) == 64


def test_whoever_was_idle_begins_at_the_lowest_counter() -> None:
    engine = Engine(slots=1)
    for _ in range(50):
        engine.send(A, 1000, 10)
    engine.run(5)
    for _ in range(50):
        engine.send(C, 1000, 10)
    before = Counter(engine.served)
    engine.run(15)
    had = engine.served - before
    assert had["c"] / had["a"] == pytest.approx(4, rel=0.15)


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


def order(engine: Engine, requests: dict[str, Request]) -> list[str]:
    found: list[str] = []
    engine.finished = lambda request: found.extend(
        name for name, each in requests.items() if each is request
    )
    engine.run(10_000)
    return found


def test_priority_goes_first_within_a_tenant_and_waiting_outweighs_it() -> None:
    engine = Engine(slots=1)
    engine.send(A, 1, 3000)
    requests = {"late": engine.send(A, 1, 100, priority=3), "plain": engine.send(A, 1, 100)}
    requests["urgent"] = engine.send(A, 1, 100, priority=-2)
    engine.run(29)
    requests["after 29 s"] = engine.send(A, 1, 100, priority=1)
    assert order(engine, requests) == ["urgent", "plain", "late", "after 29 s"]


def test_priority_between_tenants_is_a_head_start_and_starves_nobody() -> None:
    engine = Engine(slots=1)
    engine.finished = lambda request: (
        engine.send(B, 1000, 10, -5) and None if request.tenant is B else None
    )
    for _ in range(10):
        engine.send(B, 1000, 10, priority=-5)
        engine.send(A, 1000, 10, priority=5)
    engine.run(4)
    assert engine.served["a"] <= 1010
    engine.run(60)
    assert not [each for each in engine.queue if each.tenant is A]


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


MOVES = st.tuples(st.sampled_from([A, B, C]), st.integers(1, 9000), st.integers(-10, 10))


@given(st.lists(MOVES, max_size=60), st.integers(1, 20))
def test_whatever_is_asked_all_are_served_and_counts_agree(
    moves: list[tuple[Tenant, int, int]], slots: int
) -> None:
    engine = Engine(slots=slots)
    for place, (tenant, prompt, priority) in enumerate(moves):
        engine.send(tenant, prompt, 50, priority)
        engine.run(place * 0.05)
        assert len(engine.queue.running) <= slots
        assert engine.queue.waiting == len(list(engine.queue))
    engine.run(1e6)
    assert engine.queue.waiting == len(engine.queue.running) == 0
    assert sum(engine.served.values()) == sum(prompt + 50 for _, prompt, _ in moves)


def test_few_prompts_are_before_that_of_who_asks_seldom() -> None:
    engine = Engine()
    engine.send(B, 10, 1)
    for _ in range(60):
        engine.send(A, 4000, 100)
    unmade = sum(each.prompt_tokens for each in engine.queue.running if each.tenant is A)
    assert unmade <= PREFILL_TOKENS


def test_tenants_that_left_are_forgotten() -> None:
    engine = Engine()
    for place in range(1000):
        engine.send(Tenant(name=f"t{place}"), 1, 1)
        engine.run(place + 1.0)
    assert len(engine.queue._flows) <= 64


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


def names(queue: FairQueue[Ticket]) -> Iterator[str]:
    while (item := queue.pop()) is not None:
        yield item.flow_name
        queue.remove(item)


def test_served_tokens_count_while_a_request_runs() -> None:
    queue: FairQueue[Ticket] = FairQueue(3)
    for number, (tenant, made) in enumerate([(A, 10**6), (B, 1), (B, 1)]):
        queue.push(Ticket(tenant, 0, 1, lambda made=made: made, number))
        assert queue.pop() is not None
    for number, tenant in enumerate([A, B], 10):
        queue.push(Ticket(tenant, 0, 1, int, number))
    (done,) = [item for item in queue.running if item.number == 1]
    queue.remove(done)
    first = queue.pop()
    assert first is not None
    assert first.tenant is B
    assert math.isfinite(queue.retry_after(B))
