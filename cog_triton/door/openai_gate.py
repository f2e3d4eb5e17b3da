"""The gates before the OpenAI API and before ports of metrics, which answer for themselves."""

from __future__ import annotations

from cog_triton import errors
from cog_triton.door.access import Access
from cog_triton.door.json_body import require_shallow
from cog_triton.door.large_bodies import LargeBodies
from cog_triton.door.limits import Limits
from cog_triton.door.message import Answer, Forward, Refused, Request
from cog_triton.door.refusals import openai_refusal, status_of

_HEALTH = "/health"
_METRICS = ("/metrics", "/metrics/triton")


class OpenAIGate:
    """Decides on requests to the OpenAI API; answers have the shape of its errors."""

    def __init__(
        self,
        port: int,
        access: Access,
        limits: Limits,
        large_bodies: LargeBodies,
        *,
        metrics_public: bool,
    ) -> None:
        self._port = port
        self._access = access
        self._limits = limits
        self._large_bodies = large_bodies
        self._open = {_HEALTH, *(_METRICS if metrics_public else ())}

    async def decide(self, request: Request) -> Forward | Answer:
        """See `gate.Gate`."""
        try:
            if not (request.method in ("GET", "HEAD") and request.path in self._open):
                self._access.check(request)
            body, depth = request.body, self._limits.json_depth
            await self._large_bodies.run(len(body), require_shallow, body, depth)
        except errors.CogTritonError as error:
            raise Refused(status_of(error), error) from error
        headers = [pair for pair in request.headers if pair[0] != b"authorization"]
        return Forward(
            self._port, request.method, request.target, headers, request.body, request.version
        )

    def refusal(self, status: int, error: errors.CogTritonError) -> Answer:
        """See `gate.Gate`."""
        return openai_refusal(status, error)


class MetricsGate(OpenAIGate):
    """Lets nothing pass but metrics and health."""

    async def decide(self, request: Request) -> Forward | Answer:
        """See `gate.Gate`."""
        known = request.path in (_HEALTH, *_METRICS)
        if not known or request.method not in ("GET", "HEAD"):
            rule = f"{request.method[:20]} {request.path[:80]!r}: no such path or method"
            raise Refused(404, errors.NotFound(rule))
        return await super().decide(request)
