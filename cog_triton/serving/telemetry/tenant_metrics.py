"""Metrics of tenants: what each has asked for, got, and was refused; without tenants no series."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from cog_triton.serving.generation import GenerationRequest, GenerationResult
from cog_triton.serving.tenants import MOST_TENANTS, OTHER, Tenant


class TenantMetrics:
    """Counters by tenant; those that come after `MOST_TENANTS` count together, as ``other``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, help_text: str, *labels: str) -> Counter:
            names = ("tenant", *labels)
            return Counter(f"cog_triton_tenant_{name}", help_text, names, registry=registry)

        self._requests = counter("requests", "Generations of a tenant that ended", "outcome")
        self._refused = counter("refused", "Requests of a tenant that were refused", "code")
        self._prompt = counter("prompt_tokens", "Tokens of a tenant's prompts")
        self._output = counter("generation_tokens", "Tokens generated for a tenant")
        self._queue = counter("queue_seconds", "Seconds that a tenant's requests have waited")
        self._engine = counter("engine_seconds", "Seconds that they were in the engine")
        self._known: set[str] = set()

    def refused(self, tenant: Tenant | None, code: str) -> None:
        """A request got an error in the place of a generation."""
        if tenant is not None:
            self._refused.labels(self._label(tenant), code).inc()

    def ended(self, request: GenerationRequest, result: GenerationResult, outcome: str) -> None:
        """A generation ended; one that was cancelled before its turn has only waited."""
        if request.tenant is None:
            return
        name = self._label(request.tenant)
        queued = result.duration if result.queue_time is None else result.queue_time
        self._requests.labels(name, outcome).inc()
        self._queue.labels(name).inc(queued)
        self._engine.labels(name).inc(max(0.0, result.duration - queued))
        self._output.labels(name).inc(result.output_token_count)
        if result.queue_time is not None:
            self._prompt.labels(name).inc(result.prompt_tokens(request))

    def _label(self, tenant: Tenant) -> str:
        if tenant.name in self._known:
            return tenant.name
        if len(self._known) >= MOST_TENANTS:
            return OTHER
        self._known.add(tenant.name)
        return tenant.name
