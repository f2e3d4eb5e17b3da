"""The gates before the OpenAI API and before ports of metrics, which answer for themselves."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from cog_triton import errors
from cog_triton.door.gate import PrivateGate, openai_refusal
from cog_triton.door.json_body import Numbers
from cog_triton.door.message import Answer, Forward, Request, json_answer
from cog_triton.door.swapping import model_of
from cog_triton.serving.openai import static_page

_HEALTH = "/health"
_MODELS = "/v1/models"
_KEY_ONLY = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_METRICS = ("/metrics", "/metrics/triton")
_PAGE = Answer(
    200,
    static_page.PAGE,
    static_page.CONTENT_TYPE.encode(),
    tuple((name.encode(), value.encode()) for name, value in static_page.HEADERS.items()),
)


@dataclass(eq=False)
class OpenAIGate(PrivateGate):
    """Decides on requests to the OpenAI API; answers have the shape of its errors."""

    numbers = Numbers.IDS
    readiness = re.compile(_HEALTH)

    metrics_public: bool = field(kw_only=True)
    page: bool = field(default=False, kw_only=True)
    """Whether ``/`` is the page, which needs no key: it asks for one."""

    def refusal(self, status: int, error: errors.CogTritonError) -> Answer:
        """See `gate.Gate`."""
        return openai_refusal(status, error)

    async def _decide(self, request: Request) -> Forward | Answer:
        reads = request.method in ("GET", "HEAD")
        asks_page = self.page and reads and request.path == static_page.PATH
        if asks_page and self.access.api_key is not None:
            return _PAGE
        if request.path == _HEALTH:
            self.route.upstream.state.require_checked()
        public = (_HEALTH, *_METRICS) if self.metrics_public else (_HEALTH,)
        if not (reads and request.path in public):
            self.access.check(request)
        if asks_page:
            return _PAGE
        if request.path in _KEY_ONLY and self.access.api_key is None:
            raise errors.Unauthorized(
                "adapters are loaded at run time where COG_TRITON_API_KEY is set, and it is not"
            )
        await self._require_bounded(request.body)
        swapping = self.route.upstreams.swapping
        if swapping is None:
            return self._forward(request)
        if reads and request.path in _METRICS:
            return replace(self._forward(request), revise=swapping.with_metrics)
        if reads and request.path == _MODELS:
            return json_answer(200, {"object": "list", "data": swapping.models})
        if reads:
            asked = request.path.removeprefix(f"{_MODELS}/")
            described = [model for model in swapping.models if model["id"] == asked]
            return json_answer(200, described[0]) if described else self._forward(request)
        body = request.body
        name = await self.large_bodies.run(len(body), model_of, body)
        return self._forward(request, await self.route.upstream_of(name))


class MetricsGate(OpenAIGate):
    """Lets nothing pass but metrics and health."""

    async def _decide(self, request: Request) -> Forward | Answer:
        known = request.path in (_HEALTH, *_METRICS)
        if not known or request.method not in ("GET", "HEAD"):
            rule = f"{request.method[:20]} {request.path[:80]!r}: no such path or method"
            raise errors.NotFound(rule)
        return await super()._decide(request)
