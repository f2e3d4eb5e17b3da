"""The gates before the OpenAI API and before ports of metrics, which answer for themselves."""

from __future__ import annotations

import re
from dataclasses import replace

from cog_triton import errors
from cog_triton.door.access import Access
from cog_triton.door.gate import PrivateGate, openai_refusal
from cog_triton.door.json_body import Numbers
from cog_triton.door.large_bodies import LargeBodies
from cog_triton.door.limits import Limits
from cog_triton.door.message import Answer, Forward, Request, json_answer
from cog_triton.door.swapping import model_of
from cog_triton.door.upstream import Route
from cog_triton.serving.openai.page import static_page

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


class OpenAIGate(PrivateGate):
    """Decides on requests to the OpenAI API; answers have the shape of its errors."""

    numbers = Numbers.IDS
    readiness = re.compile(_HEALTH)

    def __init__(
        self,
        route: Route,
        access: Access,
        limits: Limits,
        large_bodies: LargeBodies,
        *,
        metrics_public: bool,
        page: bool = False,
    ) -> None:
        """`page` says whether ``/`` is the page, which needs no key: it asks for one."""
        super().__init__(route, access, limits, large_bodies)
        self._open = {_HEALTH, *(_METRICS if metrics_public else ())}
        self._page = page

    def refusal(self, status: int, error: errors.CogTritonError) -> Answer:
        """See `gate.Gate`."""
        return openai_refusal(status, error)

    async def _decide(self, request: Request) -> Forward | Answer:
        reads = request.method in ("GET", "HEAD")
        asks_page = self._page and reads and request.path == static_page.PATH
        if asks_page and self._access.api_key is not None:
            return _PAGE
        if request.path == _HEALTH:
            self._route.upstream.state.require_checked()
        if not (reads and request.path in self._open):
            self._access.check(request)
        if asks_page:
            return _PAGE
        if request.path in _KEY_ONLY and self._access.api_key is None:
            raise errors.Unauthorized(
                "adapters are loaded at run time where COG_TRITON_API_KEY is set, and it is not"
            )
        await self._require_bounded(request.body)
        swapping = self._route.upstreams.swapping
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
        name = await self._large_bodies.run(len(body), model_of, body)
        return self._forward(request, await self._route.upstream_of(name))


class MetricsGate(OpenAIGate):
    """Lets nothing pass but metrics and health."""

    async def _decide(self, request: Request) -> Forward | Answer:
        known = request.path in (_HEALTH, *_METRICS)
        if not known or request.method not in ("GET", "HEAD"):
            rule = f"{request.method[:20]} {request.path[:80]!r}: no such path or method"
            raise errors.NotFound(rule)
        return await super()._decide(request)
