"""Limits of tenants: requests and tokens a minute, requests at once, the largest prompt."""

from __future__ import annotations

import re

import pytest

from cog_triton.errors import Overloaded
from cog_triton.serving.admission import Admission
from cog_triton.serving.openai.error_responses import error_response
from cog_triton.serving.tenant_limits import TenantLimits
from cog_triton.serving.tenants import Tenant
from cog_triton.serving.ticket import Ticket


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


def test_a_refused_request_costs_nothing_and_no_limit_counts_nothing() -> None:
    limits = TenantLimits(Clock())
    tenant = Tenant(name="a", requests_per_minute=1, tokens_per_minute=1)
    limits.used(tenant, 2)
    assert all(refused(limits, tenant) for _ in range(5))
    limits.used(tenant, -2)
    assert refused(limits, tenant) == 0
    limits.begin(None)
    limits.used(None, 5)
    limits.begin(Tenant(name="b"))


def test_a_changed_key_changes_the_limit() -> None:
    limits = TenantLimits(clock := Clock())
    assert refused(limits, Tenant(name="a", requests_per_minute=1)) == 0
    assert refused(limits, Tenant(name="a", requests_per_minute=1)) > 0
    clock.now = 1.0
    assert refused(limits, Tenant(name="a", requests_per_minute=120)) == 0


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
