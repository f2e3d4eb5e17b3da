"""Metrics and request log by tenant: bounded labels, and nothing without tenants."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import CollectorRegistry

from cog_triton.engines.request import EngineRequest
from cog_triton.errors import InvalidArgument, Overloaded
from cog_triton.serving.generation import GenerationRequest, GenerationResult
from cog_triton.serving.telemetry.observers import CompositeObserver
from cog_triton.serving.telemetry.tenant_metrics import MOST_TENANTS, OTHER, TenantMetrics
from cog_triton.serving.tenants import CURRENT, Tenant
from cog_triton.settings import Settings
from cog_triton.text.sampling import SamplingParams


def request(tenant: Tenant | None) -> GenerationRequest:
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
    told.ended(request(tenant), DONE, None)
    told.ended(request(tenant), GenerationResult(duration=0.1), Overloaded("full"))
    told.ended(request(tenant), GenerationResult(duration=3, cancelled=True), None)
    told.ended(request(None), DONE, None)
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
